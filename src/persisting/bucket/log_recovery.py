"""Replays logs into a bucket: its own, or that of an owner that died."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from persisting.bucket.chunk import ROWS_AT_ONCE, Chunk
from persisting.bucket.delays import due_of
from persisting.bucket.log_index import PlainRows, StoredSection
from persisting.bucket.log_records import (
    check_rows,
    chunk_of_values,
    decompressed,
    read_batch,
    read_schema,
    read_values,
    split_payload,
    unknown_kind,
)
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.bucket.schema_state import EVOLVING
from persisting.errors import WALError
from persisting.records import RecordEncoder
from persisting.records.arrow import merge
from persisting.wal import FOLDER, Log, Recovery
from persisting.wal.frame import BATCH, MARK, RECORDS, ROWS, SCHEMA, START, Frame
from persisting.wal.log import segment_bytes

if TYPE_CHECKING:
    from persisting.bucket.bucket import Bucket

log = logging.getLogger("persisting")

_JOINED_BYTES = 16 * 1024 * 1024


def recover(bucket: Bucket, max_log_bytes: int) -> Log:
    """Replay the log in the bucket's folder, each record once; return the log to append to."""
    folder = bucket.options.storage_path / FOLDER
    bucket.fs.make_folder(folder)
    bucket.fs.sync_folder(folder.parent)
    recovery = Recovery(folder, bucket.fs, bucket.table.sequence)
    replay = Replay(bucket, folder, bucket.table.sequence)
    replay.add_frames(recovery.frames())
    replay.finish()
    recovered = recovery.open_log(segment_bytes(max_log_bytes))
    recovered.release(bucket.table.sequence)
    return recovered


class Replay:
    """Brings the records of a log into one bucket, in order and each record once."""

    def __init__(self, bucket: Bucket, folder: Path, after: int) -> None:
        """``after`` is the last sequence that the bucket's table holds."""
        self._bucket, self._folder, self._after = bucket, folder, after
        self._encoder: RecordEncoder | None = None
        self._rows = RecoveredRows(bucket, folder)
        self._records = 0

    def add_frames(self, frames: Iterable[Frame]) -> None:
        """Replay all frames that hold records of the bucket and are not in its table."""
        for frame in frames:
            if frame.kind == SCHEMA:
                self._use_schema(read_schema(frame, self._folder))
            elif frame.kind == START or frame.sequence <= self._after:
                continue
            elif frame.kind in (BATCH, RECORDS):
                self._add_sections(frame)
            elif frame.kind == MARK:
                self._rows.add_producers([_read_producer(frame, self._folder)])
            elif frame.kind == ROWS:
                self._add_rows_of_format_1(frame)
            else:
                raise unknown_kind(frame, self._folder)

    def add_blocks(self, blocks: Iterable[PlainRows | StoredSection]) -> None:
        """Replay rows of an indexed log."""
        for block in blocks:
            self._use_schema(block.schema)
            if isinstance(block, PlainRows):
                self._add_plain_rows(block)
            else:
                self._add_frame(block, block.frame)

    def _add_plain_rows(self, rows: PlainRows) -> None:
        assert self._encoder is not None
        chunk = rows.chunk(self._encoder, self._folder)
        self._rows.add_producers(rows.producers)
        self._rows.add(chunk, rows.place)
        self._records += chunk.count

    def _use_schema(self, schema: pa.Schema) -> None:
        """Read the following rows with this schema."""
        if self._encoder is None or not (
            self._encoder.schema is schema or self._encoder.schema.equals(schema)
        ):
            self._rows.hand_over()
            self._encoder = RecordEncoder(schema, self._bucket.rules)

    def _add_sections(self, frame: Frame) -> None:
        """Replay a frame of the bucket's own log: all its sections are of this bucket."""
        sections, _ = split_payload(frame, self._folder)
        first = 0
        for section in sections:
            stored = StoredSection(
                frame.sequence,
                frame.arrival,
                (section.epoch, section.offset),
                first,
                section.rows,
                section.producers,
                None,
                frame,
            )
            self._add_frame(stored, frame)
            first += section.rows

    def _add_frame(self, section: StoredSection, frame: Frame) -> None:
        _, stored = split_payload(frame, self._folder)
        if frame.kind == RECORDS:
            self._add_values(section, decompressed(frame, stored))
            return
        batch = read_batch(frame, stored, self._encoder, self._folder)
        self._check_rows(section, batch.num_rows)
        assert self._encoder is not None
        part = Chunk(self._encoder, batch=batch.slice(section.first, section.rows))
        due = due_of(section.producers)
        if due is not None and section.place is not None:
            self._bucket.buffer.delays.add(section.place[1], section.rows, due)
        self._rows.add_producers(section.producers)
        self._rows.add(_logged(part, section.sequence, section.arrival), section.place)
        self._records += section.rows

    def _add_values(self, section: StoredSection, raw: bytes) -> None:
        """Replay plain rows of a frame that may hold rows of other sections, too."""
        values = read_values(raw, section.sequence, self._folder)
        self._check_rows(section, len(values))
        values = values[section.first : section.first + section.rows]
        if self._encoder is None:
            raise WALError(
                f"the log in {self._folder} has records at sequence {section.sequence} without a "
                "schema before them"
            )
        self._rows.add_producers(section.producers)
        if values:
            self._rows.add_values(self._encoder, values, section, len(raw))
        self._records += section.rows

    def _add_rows_of_format_1(self, frame: Frame) -> None:
        batch = read_batch(frame, memoryview(frame.payload), self._encoder, self._folder)
        assert self._encoder is not None
        chunk = Chunk(self._encoder, batch=batch, nbytes=frame.raw_length)
        self._rows.add(_logged(chunk, frame.sequence, frame.arrival), None)
        self._records += batch.num_rows

    def _check_rows(self, section: StoredSection, rows: int) -> None:
        check_rows(section.sequence, section.first + section.rows, rows, self._folder)

    def finish(self) -> None:
        """Hand over the last rows, have later records checked against their schema, too, and
        report what was replayed."""
        self._rows.hand_over()
        self._bucket.schema_state.include(self._bucket.buffer.encoder)
        if self._records:
            self._bucket.metrics.recovered(self._records)
            log.info("recovered %d records from the log in %s", self._records, self._folder)


class RecoveredRows:
    """Collects recovered rows of one schema and hands them to the bucket in larger chunks."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self._bucket, self._folder = bucket, folder
        self._chunks: list[Chunk] = []
        self._values: list[list[Any]] = []
        self._arrivals: list[int] = []
        self._first_sequence = self._sequence = 0
        self._producers: list[ProducerSequence] = []
        self._place: tuple[int, int] | None = None
        self._rows = self._nbytes = 0
        self._encoder: RecordEncoder | None = None

    def add_producers(self, producers: Sequence[ProducerSequence]) -> None:
        """Remember numbered puts with the rows that follow: a flush in the middle of them leaves
        the rest of the rows in the log."""
        self._producers += [p for p in producers if p not in self._producers[-16:]]

    def add(self, chunk: Chunk, place: tuple[int, int] | None) -> None:
        """Add a chunk, which has its sequence and arrival time; ``place`` is its epoch and offset,
        None if it is not known."""
        self._convert_values()
        if self._nbytes + chunk.nbytes > _JOINED_BYTES:
            self._deliver()
        self._begin(place)
        self._chunks.append(chunk)
        self._rows += chunk.count
        self._nbytes += chunk.nbytes
        if self._rows >= ROWS_AT_ONCE:
            self._deliver()

    def add_values(
        self, encoder: RecordEncoder, values: list[list[Any]], section: StoredSection, nbytes: int
    ) -> None:
        """Add plain rows of a section."""
        if self._encoder is not encoder:
            self._convert_values()
            self._encoder = encoder
        self._begin(section.place)
        if not self._values:
            self._first_sequence = section.sequence
        self._values += values
        self._arrivals += [section.arrival] * len(values)
        self._sequence = section.sequence
        self._rows += len(values)
        self._nbytes += nbytes
        if self._rows >= ROWS_AT_ONCE or self._nbytes > _JOINED_BYTES:
            self.hand_over()

    def _begin(self, place: tuple[int, int] | None) -> None:
        """Check that rows follow those before them."""
        if not self._rows:
            self._place = place
        elif place is not None and self._place is not None:
            epoch, first = self._place
            if place != (epoch, first + self._rows):
                self.hand_over()  # the bucket reports the gap
                self._place = place

    def _convert_values(self) -> None:
        """Convert all plain rows in one step."""
        if not self._values:
            return
        values, self._values = self._values, []
        arrivals, self._arrivals = self._arrivals, []
        assert self._encoder is not None
        chunk = chunk_of_values(self._encoder, values, self._sequence, self._folder)
        chunk.logged(self._sequence, max(1, chunk.nbytes))
        chunk.first_sequence = self._first_sequence
        chunk.times = np.maximum.accumulate(np.array(arrivals, "int64"))
        chunk.arrival = int(chunk.times[-1])
        self._chunks.append(chunk)

    def hand_over(self) -> None:
        """Give everything collected so far to the bucket."""
        self._convert_values()
        self._deliver()

    def _deliver(self) -> None:
        chunks, self._chunks, self._rows, self._nbytes = self._chunks, [], 0, 0
        if chunks:
            producers, self._producers = self._producers, []
            place, self._place = self._place, None
            _accept(self._bucket, _joined(chunks), producers, place)


def _accept(
    bucket: Bucket, chunk: Chunk, producers: list[ProducerSequence], place: tuple[int, int] | None
) -> None:
    """Accept recovered records, and flush when the buffer is full.

    ``place`` is the epoch and the offset that the log has for them. The table may have a later
    schema than the records: a flush may have died after it had changed the schema and before it had
    added the rows.
    """
    buffer = bucket.buffer
    if place is not None and place != (buffer.epoch, buffer.end):
        raise WALError(
            f"the log has records for offset {place[1]} (epoch {place[0]}) of "
            f"{bucket.options.storage_path}, which ends at offset {buffer.end} (epoch "
            f"{buffer.epoch}): a part of the log or of the table is missing. Restore the missing "
            "files from a copy"
        )
    if chunk.encoder is not buffer.encoder:
        schema = merge(buffer.encoder.schema, chunk.schema, EVOLVING)
        if not schema.equals(chunk.schema):
            chunk.encoder = RecordEncoder(schema, bucket.rules)
    chunk.seal()
    buffer.remember(producers)
    buffer.accept([chunk], chunk.arrival)
    if buffer.nbytes > bucket.options.max_buffer_bytes:
        bucket.flush_job.commit_buffer()


def _logged(chunk: Chunk, sequence: int, arrival: int) -> Chunk:
    chunk.logged(sequence, max(1, chunk.nbytes))
    chunk.arrival = arrival
    return chunk


def _joined(chunks: list[Chunk]) -> Chunk:
    whole = last = chunks[-1]
    if len(chunks) > 1:
        whole = Chunk(last.encoder, batch=pa.concat_batches([c.batch for c in chunks]))
        whole.logged(last.sequence, sum(c.log_bytes for c in chunks))
        whole.first_sequence = chunks[0].first_sequence
        times = np.concatenate([chunk.arrivals(chunk.count) for chunk in chunks])
        whole.times = np.maximum.accumulate(times)
        whole.arrival = int(whole.times[-1])
    return whole


def _read_producer(frame: Frame, folder: Path) -> ProducerSequence:
    try:
        raw = decompressed(frame, frame.payload)
        return msgspec.msgpack.decode(raw, type=ProducerSequence)
    except msgspec.DecodeError as exc:
        raise WALError(
            f"the producer sequence at sequence {frame.sequence} of the log in {folder} cannot be "
            f"read: {exc}"
        ) from exc
