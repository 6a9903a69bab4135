"""The synchronous core below the backends: one bucket, and the parts it is made of.

``bucket`` the order of buffer, log, flush and read · ``chunk`` accepted records on their way ·
``snapshot`` a consistent view · ``snapshot_search`` finding records in it · ``group_commit`` the
use of the log · ``flush_batches`` what a flush hands to the table · ``maintenance`` compaction,
retention, versions and indexes · ``bulk_import`` files of other writers · ``shared_schema`` one
schema for a topic · ``producer_sequences`` idempotent puts · ``waiters`` consumers that wait ·
``fairness`` and ``put_cost`` what may run on an event loop · ``exit_flush`` the end of a process.
"""
