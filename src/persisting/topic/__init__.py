"""Topics: records divided into buckets, written and read as one queue.

- Definition: ``spec`` (the topic file), ``configured`` (its properties), ``topic_names``,
  ``address``, ``routing`` (records to buckets), ``registry`` (backends by name).
- Access to buckets: ``bucket_client`` (the interface), ``local`` and ``local_bucket`` (topics and
  buckets of this process), ``live_topics`` (which are open), ``backend_adapter``, ``readonly``
  (buckets on disk), ``ownership`` (owning one briefly), ``handover`` (files for the owners of
  buckets), ``local_handle`` (opening a topic here), ``open_local``, ``open_store``.
- Writing and reading: ``writer``, ``reader``, ``cursor``, ``group_session``, ``groups``,
  ``stream_merge``, ``stream_position``, ``stats``, ``synchronous``.
- The topic as a table: ``topic_table``, ``topic_versions``, ``topic_search``, ``tags``,
  ``bucket_set``, ``table_calls``.
- From outside, on files: ``topic_files``, ``scan``, ``nested_fields`` (of structs), ``inspect``,
  ``group_control`` and ``group_admin`` (consumer groups), ``work_status`` and ``work_metrics``
  (numbers of work groups), ``deletion``.
- Backups: ``backup``, ``backup_form`` (what is in one), ``backup_files`` (copying),
  ``folder_backup``, ``folder_restore``; ``store_backup``, ``store_restore`` for object stores.
- In an object store: ``store_config``, ``store_files``, ``store_inspect``, ``store_owner``,
  ``store_handover``, ``store_membership``, ``store_group_admin``, ``store_tags``,
  ``store_work_status`` and ``store_deletion``, each the form of its namesake there.
"""
