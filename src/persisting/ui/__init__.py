"""The console: a web page that shows the topics of a storage folder, or of an object store.

- Server: ``options``, ``server`` (starts it), ``app`` (routes), ``guard`` (who may ask what),
  ``requests`` (parameters and errors), ``console`` (what the screens share).
- Reading: ``storage_view`` and ``store_view`` (open topics), ``topic_rounds`` and ``sample_worker``
  (a process that samples all topics), ``sampler`` and ``series`` (the last hour),
  ``owners`` (what only they know), ``version_rows``, ``matches``, ``runs`` and ``letters``
  (versions, and records with positions),
  ``queries`` and ``query_worker`` (slow queries in processes that can be killed), ``pipelines``
  (checkpoints of Spark).
- Changing: ``tasks`` (maintenance with progress).
- Showing: ``pages`` (templates), ``value_trees``, ``charts``, ``texts`` and ``texts_zh``.
- ``screens``: one module for each screen.

It reads without a lock, as the command line does, and changes nothing unless ``allow_changes`` is
set. Needs the extra ``ui``; nothing outside of this package imports it except ``persisting ui``.
"""
