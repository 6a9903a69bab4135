"""The backends that users open.

``protocol`` is the contract of every backend. ``memory`` keeps it in its simplest form. ``lance``
and ``persisting`` open a bucket and hand it to ``table_backend``, the async interface of a bucket.
It is composed of parts: ``bucket_access`` runs blocking work in threads, ``bucket_writer`` puts,
``bucket_reader`` reads pages, and ``table_versions``, ``table_search`` and ``table_maintenance``
offer what the table can do beyond a queue.
"""
