"""Encodes puts as frames of a log, each after a frame with the schema of its records."""

from __future__ import annotations

import pyarrow as pa

from persisting import codec
from persisting.bucket.delays import is_delay
from persisting.bucket.log_records import Section, batch_payload, rows_payload, schema_payload
from persisting.bucket.pending_puts import LogEntry, LoggedBucket, Piece
from persisting.wal import Payload
from persisting.wal.frame import START, SegmentStart, encode_start


class FrameEncoder:
    """Encodes what one log gets, in this order. Guarded by the lock of the log."""

    def __init__(self, codec_id: int) -> None:
        self._codec = codec_id
        self._schema: pa.Schema | None = None
        """The schema of the last frames; None if the log may lack it."""
        self._schema_payload: tuple[pa.Schema, Payload] | None = None

    def forget_schema(self) -> None:
        """Repeat the schema: the log may lack the last frames."""
        self._schema = None

    def encode(
        self, entries: list[LogEntry], next_row: dict[LoggedBucket, tuple[int, int]]
    ) -> list[LogEntry]:
        """Fill in the frames of the entries; ``next_row`` is the epoch and offset of the next
        record of each bucket."""
        for entry in entries:
            producers = [] if entry.producer is None else [entry.producer]
            delayed = entry.producer is not None and is_delay(entry.producer)
            for piece in entry.pieces:
                schema = piece.whole.schema
                if self._schema is not schema and self._schema != schema:
                    self._schema = schema
                    entry.payloads.append(self._schema_frame(schema))
                sections = []
                for bucket, chunk in piece.sections:
                    epoch, offset = next_row[bucket]
                    next_row[bucket] = epoch, offset + chunk.count
                    sections.append(Section(bucket.number, epoch, offset, chunk.count, producers))
                entry.payloads.append(self._frame(piece, sections, delayed))
        return entries

    def preamble(
        self, last_written: int, last_of: dict[int, int], schema: pa.Schema
    ) -> list[Payload]:
        """Return the first frames of a new segment, which make it readable by itself.

        ``last_of`` has, by bucket, the last sequence that holds records of it.
        """
        start = encode_start(SegmentStart(last_written, last_of))
        return [Payload(START, codec.NONE, len(start), start), self._schema_frame(schema)]

    def _frame(self, piece: Piece, sections: list[Section], delayed: bool) -> Payload:
        if piece.whole.is_open:
            rows = [row for _, chunk in piece.sections for row in chunk.rows or ()]
            if delayed:  # readers join plain rows of several frames, and would lose their places
                batch = piece.whole.encoder.to_batch(rows)
                return batch_payload(batch, sections, self._codec)
            return rows_payload(rows, sections, self._codec)
        return batch_payload(piece.whole.batch, sections, self._codec)

    def _schema_frame(self, schema: pa.Schema) -> Payload:
        if self._schema_payload is None or self._schema_payload[0] is not schema:
            self._schema_payload = schema, schema_payload(schema)
        return self._schema_payload[1]
