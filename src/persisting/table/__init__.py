"""The Lance table of one bucket.

``table`` the table · ``repair`` opening · ``commit`` durable versions · ``schema_change`` columns ·
``operations``, ``verify`` calls on an open table · ``bulk_write``, ``bulk_files`` data files of
other processes · ``leftovers`` data files that no version names · ``compaction``, ``retention``,
``indexes``, ``search``, ``versions`` one feature each · ``text_analysis`` words of texts and
queries, ``text_query`` what a text search looks for, ``text_search`` with the index or by reading,
``text_scoring`` without an index · ``view`` reading · ``layout``, ``properties``, ``checksums``,
``files`` what is stored · ``lance_errors`` errors of Lance · ``alignment`` arrays on which Lance
would panic.

In an object store: ``store_table`` the table · ``fenced_commit`` versions under a fence ·
``store_bulk_files``, ``store_verify`` what else differs there.
"""
