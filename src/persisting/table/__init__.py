"""The Lance table of one bucket.

``table`` the table · ``repair`` opening · ``commit`` durable versions · ``schema_change`` columns ·
``operations``, ``bulk_write``, ``verify`` calls on an open table · ``compaction``, ``retention``,
``indexes``, ``search``, ``versions`` one feature each · ``view`` reading · ``layout``,
``properties``, ``checksums``, ``files`` what is stored · ``lance_errors`` errors of Lance.
"""
