"""One flush of a bucket: the buffer to the table, then the release of the log."""

from __future__ import annotations

import logging
import time

from persisting.bucket.buffer import Buffer
from persisting.bucket.delays import DELAYS
from persisting.bucket.flusher import Flusher
from persisting.bucket.lifecycle import Lifecycle
from persisting.bucket.producer_sequences import WRITERS
from persisting.bucket.puts import Puts
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.table_writer import TableWriter
from persisting.errors import WALError
from persisting.records import Rules

log = logging.getLogger("persisting")


class FlushJob:
    """Does what :class:`~persisting.bucket.flusher.Flusher` decides when to do.

    It does not keep the bucket alive, nor its lock: whoever calls it holds the bucket.
    """

    def __init__(
        self,
        place: object,
        rules: Rules,
        lifecycle: Lifecycle,
        buffer: Buffer,
        schema: SchemaState,
        puts: Puts,
        writer: TableWriter,
        flusher: Flusher,
    ) -> None:
        self._place, self._rules, self._lifecycle = place, rules, lifecycle
        self._buffer, self._schema, self._puts = buffer, schema, puts
        self._writer, self._table = writer, writer.table
        self._flusher = flusher

    def run(self) -> bool:
        """Commit the buffer to the table, then release the log, or restart it if it has failed;
        return whether there was anything to commit."""
        if self._lifecycle.released:
            return False
        with self._flusher.lock:
            flushed = not self._lifecycle.released and self._commit()
        group_commit = self._puts.group_commit
        if group_commit is not None and not self._lifecycle.released:
            if group_commit.failed:
                group_commit.restart_after_failure()
            else:
                group_commit.release()
        return flushed

    def commit_buffer(self, at_least: int = 0) -> None:
        """Commit the buffer to the table, and leave the log as it is.

        The table gets a log sequence of ``at_least`` that, if there is anything to commit.
        """
        with self._flusher.lock:
            self._commit(at_least)

    def _commit(self, at_least: int = 0) -> bool:
        """Commit the buffer with its log sequence; return whether there was anything.

        The log of a topic is first synced up to there: a put to several buckets must not be in one
        bucket's table while power loss can still take its part in another. And a reader that sees
        the new version before it is durable may rely on its records.
        """
        with self._schema.lock:
            chunks, encoder = self._buffer.take_for_flush(), self._buffer.encoder
            properties = {
                WRITERS: self._buffer.producers.encode(),
                DELAYS: self._buffer.delays.encode(self._buffer.end, time.time_ns() // 1000),
            }
        if not chunks:
            return False
        group_commit = self._puts.group_commit
        if group_commit is not None and group_commit.is_shared:
            try:
                group_commit.sync_through(chunks[-1].sequence)
            except WALError as exc:
                # The records go to the table instead; the log is restarted after that.
                log.error("%s; flushing to the table instead", exc)
        sequence = max(self._table.sequence, chunks[-1].sequence, at_least)
        self._writer.append(chunks, encoder, self._rules, sequence, properties)
        return True
