"""Batches of pinned rows: in order or shuffled, divided among ranks and workers, resumable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from persisting.data import loader_state, stream_state
from persisting.data.isolation import OpensPerProcess, PerProcess, open_rows
from persisting.data.order import Blocks, Order, order_of
from persisting.data.pin import Pin
from persisting.data.read_ahead import read_ahead
from persisting.data.schedule import Schedule
from persisting.data.stream_state import StreamState, WorkerPlace
from persisting.errors import InvalidArgument


@dataclass(frozen=True)
class StreamOptions:
    """The options of a stream that both kinds of streams have."""

    columns: tuple[str, ...] | None
    where: str | None
    batch_size: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class Worker:
    """One of some processes that read for one rank."""

    number: int
    count: int


@dataclass(frozen=True)
class PinnedOptions:
    """The options that only a stream of pinned rows has."""

    shuffle: int | None
    epochs: int | None
    remainder: str


class PinnedStream(OpensPerProcess):
    """Reads the rows of a pin, epoch by epoch."""

    def __init__(self, pin: Pin, options: StreamOptions, pinned: PinnedOptions) -> None:
        self._pin, self._options, self._pinned = pin, options, pinned
        self._epoch = self._position = 0
        self._place: WorkerPlace | None = None
        """Set in a worker of a loader, whose state is its own."""
        self._blocks: Blocks | None = None
        """From a state, whose order must be continued; None: as the rows suggest."""
        self._rows = PerProcess(self._open)
        self._rows.get()

    def _open(self) -> Any:
        return open_rows(self._pin, self._options.columns, self._options.where)

    @property
    def source(self) -> str:
        return self._pin.source

    @property
    def schema(self) -> pa.Schema:
        return self._rows.get().schema

    @property
    def rows(self) -> int:
        """The rows of one epoch."""
        return int(self._rows.get().size)

    @property
    def blocks(self) -> Blocks:
        return self._blocks or self._rows.get().blocks

    def _schedule(self, first: int) -> Schedule:
        given = self._options
        return Schedule(
            self.rows, first, given.world_size, given.batch_size, self._pinned.remainder
        )

    def _last_epoch(self) -> int | None:
        """Return the epoch before which the present iteration ends."""
        epochs = self._pinned.epochs
        return None if epochs is None else (self._epoch // epochs + 1) * epochs

    # Iterating

    def batches(self, worker: Worker | None) -> Iterator[pa.RecordBatch]:
        """Continue where the stream is, perhaps as a worker; the state follows each batch."""
        given, remainder = self._options, self._pinned.remainder
        layout = given.world_size, given.batch_size, remainder
        if worker is not None and self._place is None:
            self._place = WorkerPlace(worker.count, 0, 0, *layout)
        place = self._place
        if place is not None:
            count = 0 if worker is None else worker.count
            then = place.world_size, place.batch_size, place.remainder
            if (place.count, *then) != (count, *layout):
                raise InvalidArgument(
                    f"the state is that of one of {place.count} workers of a loader, with "
                    f"world_size={place.world_size}, batch_size={place.batch_size} and remainder="
                    f"{place.remainder!r}. To continue with another layout, pass the state of the "
                    "whole loader to stream.load_state_dict(), and create a loader of that stream"
                )
        return self._iterate(worker or Worker(0, 1))

    def _iterate(self, worker: Worker) -> Iterator[pa.RecordBatch]:
        last = self._last_epoch()
        while last is None or self._epoch < last:
            if last is None and not self._schedule(0).steps:
                raise InvalidArgument(
                    f"an epoch of {self.source} has {self.rows} rows, which make no batch, and "
                    "epochs=None would wait forever"
                )
            yield from self._epoch_batches(worker)
        if self._place is not None:  # the next iteration begins with the first worker
            self._place = msgspec.structs.replace(self._place, step=0, turn=0)

    def _epoch_batches(self, worker: Worker) -> Iterator[pa.RecordBatch]:
        epoch, place = self._epoch, self._place
        schedule = self._schedule(self._position)
        first, turn = (0, 0) if place is None else (place.step, place.turn)
        workers = worker.count
        own = range(first + (worker.number - turn) % workers, schedule.steps, workers)
        batches = self._read(schedule, own, epoch, own_memory=place is not None)
        for step, batch in zip(own, batches, strict=True):
            if place is None:
                self._position = schedule.start(step + 1)
            else:
                following = (turn + step + 1 - first) % workers
                self._place = msgspec.structs.replace(place, step=step + 1, turn=following)
            yield batch
        if place is not None:
            following = (turn + max(0, schedule.steps - first)) % workers
            self._place = msgspec.structs.replace(place, step=0, turn=following)
        self._epoch, self._position = epoch + 1, 0

    def _read(
        self, schedule: Schedule, steps: range, epoch: int, *, own_memory: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches of some steps; their rows are read window by window.

        With ``own_memory`` a batch is never a part of a larger one, all of which would be sent to
        another process with it.
        """
        rows, rank = self._rows.get(), self._options.rank
        order = order_of(rows.size, self.blocks, self._pinned.shuffle, epoch)

        def fetch(positions: np.ndarray) -> _Part:
            numbers = order.rows_at(positions)
            by_number = np.argsort(numbers, kind="stable")
            fetched = rows.fetch(numbers[by_number])
            places = np.empty(len(numbers), np.int64)
            places[by_number] = np.arange(len(numbers))
            is_sorted = self._pinned.shuffle is None and bool((np.diff(numbers) >= 0).all())
            return _Part(fetched, None if is_sorted and not own_memory else places)

        shares = (schedule.share(step, rank) for step in steps)
        parts = read_ahead(fetch, _by_window(shares, order))
        with closing(parts):
            joined = _Joined(parts, rows.schema)
            for step in steps:
                yield joined.take(len(schedule.share(step, rank)))

    # State

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._position, self._place = epoch, 0, None

    def state(self, batches: int = 0) -> dict[str, Any]:
        """Return the state, or the one after this rank has yielded some more batches."""
        epoch, position = self._epoch, self._position
        if batches:
            epoch, position = self._advanced(epoch, position, batches)
        state = stream_state.encode(self._state(epoch, position))
        if stream_state.size_of(state) > stream_state.MOST_BYTES:
            raise InvalidArgument(
                f"the state of a stream without a tag holds a version for each of the "
                f"{len(self._pin.versions)} buckets, which would take more than "
                f"{stream_state.MOST_BYTES} bytes; tag the topic and read the tag"
            )
        return state

    def _state(self, epoch: int, position: int) -> StreamState:
        pin, blocks = self._pin, self.blocks
        return StreamState(
            topic=pin.topic,
            tag=pin.tag,
            tag_id=pin.tag_id,
            versions=pin.versions if pin.tag is None else None,
            where=stream_state.condition_of(self._options.where),
            shuffle=self._pinned.shuffle,
            blocks=(blocks.block_rows, blocks.window_blocks),
            epoch=epoch,
            position=position,
            worker=self._place,
        )

    def _advanced(self, epoch: int, position: int, batches: int) -> tuple[int, int]:
        """Return the place that is some batches of this rank further on."""
        last = self._last_epoch()
        schedule = self._schedule(position)
        while batches > schedule.steps:
            if (last is not None and epoch + 1 >= last) or not self._schedule(0).steps:
                raise InvalidArgument(f"the stream ends {batches - schedule.steps} batches earlier")
            epoch, position, batches = epoch + 1, 0, batches - schedule.steps
            schedule = self._schedule(0)
        return epoch, schedule.start(batches) if batches else position

    def load(self, given: Any) -> None:
        """Continue at a state: of a stream, or of the loader that a stream was read with."""
        if loader_state.is_of_loader(given):
            parts, skipped = loader_state.stream_states(given)
        else:
            parts, skipped = [given], 0
        states = [self._checked(part) for part in parts]
        state, before = states[0], self._pin
        if state.versions is not None and state.versions != before.versions:
            self._read_versions(msgspec.structs.replace(before, versions=state.versions))
        try:
            if loader_state.is_of_loader(given) and state.worker is not None:
                epoch, position = loader_state.place_of(states, self.rows, skipped)
                state = msgspec.structs.replace(state, epoch=epoch, position=position, worker=None)
            if not 0 <= state.position <= self.rows or state.epoch < 0:
                raise InvalidArgument(
                    f"the state is at row {state.position} of epoch {state.epoch}, and an epoch of "
                    f"{self.source} has {self.rows} rows"
                )
        except BaseException:
            if self._pin is not before:  # a refused state changes nothing
                self._read_versions(before)
            raise
        self._blocks = Blocks(*state.blocks)
        self._epoch, self._position, self._place = state.epoch, state.position, state.worker

    def _read_versions(self, pin: Pin) -> None:
        self._pin = pin
        self._rows.expire()

    def _checked(self, given: Any) -> StreamState:
        """Return a state; raise if its rows or their order are not those of this stream."""
        state, pin = stream_state.decode(given, StreamState), self._pin
        if state.topic != pin.topic:
            raise InvalidArgument(
                f"the state is of another topic: its id is {state.topic!r}, that of {pin.place} "
                f"is {pin.topic!r}"
            )
        if state.tag != pin.tag:
            raise InvalidArgument(
                f"the state is of {_tag(state.tag)}, but this stream reads {_tag(pin.tag)}"
            )
        if state.tag_id != pin.tag_id:
            raise InvalidArgument(
                f"tag {pin.tag!r} was replaced since the state was taken, and holds other rows"
            )
        if state.where != stream_state.condition_of(self._options.where):
            raise InvalidArgument(
                f"the state was taken with where={state.where!r}, but this stream has "
                f"where={self._options.where!r}"
            )
        if state.shuffle != self._pinned.shuffle:
            raise InvalidArgument(
                f"the state was taken with shuffle={state.shuffle!r}, but this stream has "
                f"shuffle={self._pinned.shuffle!r}"
            )
        if state.versions is not None and len(state.versions) != len(pin.versions):
            raise InvalidArgument(
                f"the state has versions of {len(state.versions)} buckets, but the topic has "
                f"{len(pin.versions)}"
            )
        if min(state.blocks) < 1:
            raise InvalidArgument(f"the state has impossible blocks: {state.blocks}")
        return state


class _Part:
    """Rows of one window, handed out in order."""

    def __init__(self, rows: pa.RecordBatch, places: np.ndarray | None) -> None:
        """``places`` says which row comes when; None: in the order of the rows."""
        self._rows, self._places, self._next = rows, places, 0

    @property
    def left(self) -> int:
        return int(self._rows.num_rows) - self._next

    def take(self, count: int) -> pa.RecordBatch:
        first, self._next = self._next, self._next + count
        if self._places is None:
            return self._rows.slice(first, count)
        return self._rows.take(pa.array(self._places[first : first + count]))


class _Joined:
    """Cuts batches of the right size from parts of any size."""

    def __init__(self, parts: Iterator[_Part], schema: pa.Schema) -> None:
        self._parts = parts
        self._empty = pa.RecordBatch.from_pylist([], schema=schema)
        self._part: _Part | None = None

    def take(self, count: int) -> pa.RecordBatch:
        """Return the next rows; the parts must have enough."""
        pieces = []
        while count:
            while self._part is None or not self._part.left:
                self._part = None  # release its memory before the next one is waited for
                self._part = next(self._parts)
            pieces.append(self._part.take(min(count, self._part.left)))
            count -= pieces[-1].num_rows
        if len(pieces) == 1:
            return pieces[0]
        return pa.concat_batches(pieces) if pieces else self._empty


def _by_window(shares: Iterable[np.ndarray], order: Order) -> Iterator[np.ndarray]:
    """Join the positions of steps as long as they are in one window of the order.

    The first step is by itself: its batch does not wait for the rest of the window.
    """
    pending: list[np.ndarray] = []
    first = end = 0
    for number, share in enumerate(shares):
        if number == 1 and pending:
            yield np.concatenate(pending)
            pending = []
        for run in np.split(share, np.flatnonzero(np.diff(share) < 0) + 1):  # padding starts over
            while len(run):
                if pending and not first <= run[0] < end:
                    yield np.concatenate(pending)
                    pending = []
                if not pending:
                    first, end = int(run[0]), order.window_end(int(run[0]))
                cut = int(np.searchsorted(run, end))
                pending.append(run[:cut])
                run = run[cut:]
    if pending:
        yield np.concatenate(pending)


def _tag(name: str | None) -> str:
    return "a stream without a tag" if name is None else f"tag {name!r}"
