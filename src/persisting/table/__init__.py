"""The Lance table of one bucket.

``table`` the table · ``repair`` opening · ``commit`` durable versions · ``schema_change`` columns ·
``operations``, ``bulk_write``, ``verify`` calls on an open table · ``compaction``, ``retention``,
``indexes``, ``search``, ``versions`` one feature each · ``text_analysis`` words of texts and
queries, ``text_query`` what a text search looks for, ``text_search`` with the index or by reading,
``text_scoring`` without an index · ``view`` reading · ``layout``, ``properties``, ``checksums``,
``files`` what is stored · ``lance_errors`` errors of Lance.
"""
