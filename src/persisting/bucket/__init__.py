"""The synchronous core below the backends: one bucket, the log that buckets share, their parts.

A bucket: ``bucket`` wires its parts together, and opens and closes it · ``lifecycle`` whether it
takes calls · ``folder_ownership`` its lock · ``exit_flush`` the end of a process ·
``readonly_bucket`` a bucket that is read without owning it.

Records: ``chunk`` accepted records on their way · ``buffer`` acknowledged records that the table
lacks · ``schema_state`` the schema of the next records · ``shared_schema`` one schema for a topic ·
``vector_fields`` vectors of one length · ``large_ints`` integers that a float cannot hold ·
``producer_sequences`` idempotent puts · ``delays``, ``pending_delays``, ``delayed_puts`` records
for later delivery · ``snapshot``, ``snapshot_search`` a consistent view, and search in it ·
``waiters`` consumers that wait · ``group_offsets`` what groups have committed.

Puts and the log: ``put_cost`` how much work a put is · ``puts`` accepts puts · ``pending_puts``,
``group_commit`` puts on their way to the log · ``owner_log`` one log for a topic's buckets in this
process · ``log_frames``, ``log_records`` frames and their payloads · ``log_note`` which log a
bucket needs · ``log_positions`` how far a log is acknowledged · ``log_recovery``, ``log_index``
reading what a dead owner left · ``log_inspection`` reports and repair of these logs ·
``log_follower``, ``log_view`` reading a log without its lock · ``path_watch`` waiting for files to
change.

The table: ``flusher`` when to flush · ``flush_job`` one flush · ``flush_batches`` chunks as batches
of one schema · ``table_writer`` changes of the table, one at a time · ``maintenance`` compaction,
retention, versions and indexes · ``buffer_bypass`` changes past the buffer: restores, and
``bulk_import`` files of other writers.

Hand-overs of files to the owner of a bucket: ``handover_notes`` requests and answers as files ·
``folder_notes`` those of one bucket · ``handover_watch`` wakes the owner · ``handover_inbox`` does
what is asked.

In an object store: ``store_ownership`` who owns a bucket · ``store_bucket``, ``store_lifecycle``,
``store_flush``, ``store_owner_log``, ``store_maintenance``, ``store_schema``, ``store_notes`` and
``store_log_inspection`` what differs there · ``lanes`` several group commits under way ·
``store_groups`` offsets and keepers of groups · ``store_reader``, ``store_follower`` a bucket read
without owning it · ``slot_log`` its owner's log, as readers follow it · ``slot_files`` objects of a
log as segments.

Nothing here needs an event loop, and everything may be called from any thread. The locks, in the
order in which they are taken:

1. *restart* of a group commit (one log): a failed log is being replaced
2. *flush* (one bucket): a flush is running
3. *table* (one bucket): the table is being changed
4. *log* (one log): puts are being written and acknowledged; the lock of its lanes comes next
5. *state* (one log, or one bucket without a log): schema, buffers and the queue of puts; held
   briefly, never during calls of Lance, conversions or I/O (but for the lock's note when the
   process exits)
6. the locks inside ``wal.Log``
"""
