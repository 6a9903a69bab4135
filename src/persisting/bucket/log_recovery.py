"""Replays logs into a bucket: its own, or that of an owner that died."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from persisting.bucket.bucket import Bucket
from persisting.bucket.chunk import ROWS_AT_ONCE, Chunk
from persisting.bucket.log_records import (
    Section,
    check_rows,
    checked_schema,
    chunk_of_values,
    decompressed,
    read_batch,
    read_schema,
    read_values,
    split_payload,
)
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.errors import WALError
from persisting.records import RecordEncoder
from persisting.wal import FOLDER, Log, Recovery
from persisting.wal.frame import BATCH, MARK, RECORDS, ROWS, SCHEMA, START, Frame

log = logging.getLogger("persisting")

_JOINED_BYTES = 16 * 1024 * 1024


def has_log(folder: Path) -> bool:
    """Whether a bucket folder holds log segments of its own."""
    path = folder / FOLDER
    return path.is_dir() and any(name.suffix == ".wal" for name in path.iterdir())


def recover(bucket: Bucket) -> Log:
    """Replay the log in the bucket's folder, each record once; return the log to append to."""
    folder = bucket.options.storage_path / FOLDER
    bucket.fs.make_folder(folder)
    bucket.fs.sync_folder(folder.parent)
    recovery = Recovery(folder, bucket.fs, bucket.table.sequence, bucket.number)
    replay = Replay(bucket, folder, bucket.table.sequence)
    replay.add_all(recovery.frames())
    replay.finish()
    recovered = recovery.open_log()
    recovered.release(bucket.table.sequence)
    return recovered


class Replay:
    """Brings the frames of a log into one bucket, in order and each record once."""

    def __init__(self, bucket: Bucket, folder: Path, after: int) -> None:
        """``after`` is the last sequence that the bucket's table holds."""
        self._bucket, self._folder, self._after = bucket, folder, after
        self._encoder: RecordEncoder | None = None
        self._rows = RecoveredRows(bucket, folder)
        self.records = 0

    def add_all(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self.add(frame)

    def add(self, frame: Frame) -> None:
        """Replay a frame, unless the table holds its records."""
        if frame.kind == SCHEMA:
            self.use_schema(read_schema(frame, self._folder))
        elif frame.kind == START or frame.sequence <= self._after:
            return
        elif frame.kind in (BATCH, RECORDS):
            sections, stored = split_payload(frame, self._folder)
            first = 0
            for section in sections:
                if section.bucket == self._bucket.number:
                    self._add_section(frame, section, first, stored)
                first += section.rows
        elif frame.kind == MARK:
            self._rows.add_producer(_read_producer(frame, self._folder))
        elif frame.kind == ROWS:
            batch = read_batch(frame, memoryview(frame.payload), self._encoder, self._folder)
            assert self._encoder is not None
            self._rows.add(frame, Chunk(self._encoder, batch=batch, nbytes=frame.raw_length), None)
            self.records += batch.num_rows
        else:
            raise WALError(
                f"the log in {self._folder} holds a frame of unknown kind {frame.kind} at sequence "
                f"{frame.sequence}; it was written by a newer version, upgrade persisting"
            )

    def use_schema(self, schema: pa.Schema) -> None:
        """Read the following rows with this schema."""
        if self._encoder is None or not self._encoder.schema.equals(schema):
            self._rows.hand_over()
            self._encoder = RecordEncoder(schema, self._bucket.rules)

    def _add_section(self, frame: Frame, section: Section, first: int, stored: memoryview) -> None:
        schema = checked_schema(self._encoder, frame, self._folder)
        assert self._encoder is not None
        for producer in section.producers:
            self._rows.add_producer(producer)
        place = section.epoch, section.offset
        last = first + section.rows
        if frame.kind == RECORDS:
            values = read_values(frame, stored, len(schema), self._folder)
            check_rows(frame, last, len(values), self._folder)
            self._rows.add_values(frame, self._encoder, values[first:last], place)
        else:
            batch = read_batch(frame, stored, self._encoder, self._folder)
            check_rows(frame, last, batch.num_rows, self._folder)
            part = batch.slice(first, section.rows)
            self._rows.add(frame, Chunk(self._encoder, batch=part), place)
        self.records += section.rows

    def finish(self) -> None:
        """Hand over the last rows, and report what was replayed."""
        self._rows.hand_over()
        self._bucket.finish_recovery()
        if self.records:
            self._bucket.metrics.recovered(self.records)
            log.info("recovered %d records from the log in %s", self.records, self._folder)


class RecoveredRows:
    """Collects recovered rows of one schema and hands them to the bucket in larger chunks."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self._bucket, self._folder = bucket, folder
        self._chunks: list[Chunk] = []
        self._values: list[list[Any]] = []
        self._value_frames: list[tuple[Frame, int]] = []
        self._producers: list[ProducerSequence] = []
        self._place: tuple[int, int] | None = None
        self._rows = self._nbytes = 0
        self._value_encoder: RecordEncoder | None = None

    def add_producer(self, producer: ProducerSequence) -> None:
        """Remember a numbered put with the rows that follow: a flush in the middle of them leaves
        the rest of the rows in the log."""
        if producer not in self._producers:
            self._producers.append(producer)

    def add(self, frame: Frame, chunk: Chunk, place: tuple[int, int] | None) -> None:
        self._convert_values()
        if self._nbytes + chunk.nbytes > _JOINED_BYTES:
            self._deliver()
        self._begin(place)
        chunk.logged(frame.sequence, max(1, chunk.nbytes))
        chunk.arrival = frame.arrival
        self._chunks.append(chunk)
        self._rows += chunk.count
        self._nbytes += chunk.nbytes
        if self._rows >= ROWS_AT_ONCE:
            self._deliver()

    def add_values(
        self,
        frame: Frame,
        encoder: RecordEncoder,
        values: list[list[Any]],
        place: tuple[int, int],
    ) -> None:
        if self._value_encoder is not encoder:
            self._convert_values()
            self._value_encoder = encoder
        self._begin(place)
        self._values += values
        self._value_frames.append((frame, len(values)))
        self._rows += len(values)
        self._nbytes += frame.raw_length
        if self._rows >= ROWS_AT_ONCE or self._nbytes > _JOINED_BYTES:
            self.hand_over()

    def _begin(self, place: tuple[int, int] | None) -> None:
        """Check that rows follow those before them; ``place`` is their epoch and offset."""
        if not self._rows:
            self._place = place
        elif place is not None and self._place is not None:
            epoch, first = self._place
            if place != (epoch, first + self._rows):
                self.hand_over()  # the bucket reports the gap
                self._place = place

    def _convert_values(self) -> None:
        """Convert all rows of values in one step."""
        if not self._values:
            return
        values, self._values = self._values, []
        frames, self._value_frames = self._value_frames, []
        assert self._value_encoder is not None
        chunk = chunk_of_values(self._value_encoder, values, frames[-1][0], self._folder)
        chunk.logged(frames[-1][0].sequence, max(1, sum(f.raw_length for f, _ in frames)))
        chunk.first_sequence = frames[0][0].sequence
        if len(frames) > 1:
            times = np.repeat([f.arrival for f, _ in frames], [count for _, count in frames])
            chunk.times = np.maximum.accumulate(times)
        chunk.arrival = max(f.arrival for f, _ in frames)
        self._chunks.append(chunk)

    def hand_over(self) -> None:
        self._convert_values()
        self._deliver()

    def _deliver(self) -> None:
        chunks, self._chunks, self._rows, self._nbytes = self._chunks, [], 0, 0
        producers, self._producers = self._producers, []
        place, self._place = self._place, None
        if chunks:
            self._bucket.accept_recovered(_joined(chunks), producers, place)
        else:
            self._producers = producers


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
