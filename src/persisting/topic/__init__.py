"""Topics: records divided into buckets, written and read as one queue.

- Definition: ``spec`` (the topic file), ``topic_names``, ``address``, ``routing`` (records to
  buckets), ``registry`` (backends by name).
- Access to buckets: ``bucket_client`` (the interface), ``local`` (buckets of this process),
  ``backend_adapter``, ``readonly`` (buckets on disk), ``ownership``, ``open_local``.
- Writing and reading: ``writer``, ``reader``, ``cursor``, ``group_session``, ``groups``,
  ``stream_merge``, ``stats``, ``synchronous``.
- The topic as a table: ``topic_table``, ``topic_versions``, ``topic_search``, ``tags``,
  ``bucket_set``, ``table_calls``.
- From outside, on files: ``topic_files``, ``scan``, ``inspect``, ``group_admin``, ``backup``.
"""
