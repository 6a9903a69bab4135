"""The synchronous core below the backends: one bucket, the log that buckets share, their parts.

``bucket`` wires the parts of one bucket together · ``buffer`` acknowledged records that the table
lacks · ``schema_state`` the schema of the next records · ``pending_puts``, ``group_commit`` puts on
their way to the log · ``lanes`` several groups of them under way to an object store · ``flusher``
when to flush · ``table_writer`` changes of the table, one at a time · ``maintenance`` compaction,
retention, versions and indexes · ``owner_log`` one log for a topic's buckets in this process ·
``log_recovery``, ``log_index`` reading what a dead owner left · ``log_inspection`` reports and
repair of these logs · ``log_follower``, ``log_view`` reading a log without its lock ·
``log_positions`` how far a log is acknowledged · ``path_watch`` waiting for files to change ·
``log_records`` the payloads of frames · ``log_note`` which log a bucket needs · ``chunk`` accepted
records on their way · ``snapshot``, ``snapshot_search`` a consistent view, and search in it ·
``vector_fields`` vectors of one length · ``bulk_import`` files of other writers · ``shared_schema``
one schema for a topic · ``producer_sequences`` idempotent puts · ``waiters`` consumers that wait ·
``exit_flush`` the end of a process.

Nothing here needs an event loop, and everything may be called from any thread. The locks, in the
order in which they are taken:

1. *restart* of a group commit (one log): a failed log is being replaced
2. *flush* (one bucket): a flush is running
3. *table* (one bucket): the table is being changed
4. *log* (one log): puts are being written and acknowledged; the lock of its lanes comes next
5. *state* (one log, or one bucket without a log): schema, buffers and the queue of puts; held
   briefly, never during I/O, calls of Lance or conversions
6. the locks inside ``wal.Log``
"""
