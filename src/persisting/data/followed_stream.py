"""Batches of a topic that grows, as its records arrive."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from persisting.data import loader_state, stream_state
from persisting.data.isolation import OpensPerProcess, PerProcess, open_live
from persisting.data.live_rows import LiveRead
from persisting.data.pinned_stream import StreamOptions, Worker
from persisting.data.place import Place
from persisting.data.stream_state import FollowState
from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError

_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.2


class FollowedStream(OpensPerProcess):
    """Follows a topic from its first record on, and waits for more.

    Each rank reads the buckets whose number is its rank modulo ``world_size``, and each worker some
    of those. So no two read the same record, and a position is one offset for each bucket.
    """

    def __init__(self, place: Place, options: StreamOptions, idle_timeout: float | None) -> None:
        self._place, self._options = place, options
        self._idle_timeout = idle_timeout
        self._rows = PerProcess(self._open)
        live = self._rows.get()
        self._topic_id, self._buckets = live.topic_id, live.buckets
        if options.world_size > self._buckets:
            raise InvalidArgument(
                f"follow=True gives each rank buckets of its own: world_size={options.world_size} "
                f"needs a topic of as many buckets, and {place} has {self._buckets}"
            )
        self._offsets = dict.fromkeys(self._own(None), 0)
        self._epochs: dict[int, int] = {}

    def _open(self) -> Any:
        return open_live(self._place, self._options.columns, self._options.where)

    @property
    def source(self) -> str:
        return str(self._place)

    def _own(self, worker: Worker | None) -> Sequence[int]:
        """Return the buckets of this rank, or of one of its workers."""
        buckets = range(self._options.rank, self._buckets, self._options.world_size)
        return buckets if worker is None else buckets[worker.number :: worker.count]

    # Iterating

    def batches(self, worker: Worker | None) -> Iterator[pa.RecordBatch]:
        """Continue at the offsets of the stream; the state follows each batch."""
        own = self._own(worker)
        missing = [bucket for bucket in own if bucket not in self._offsets]
        if missing:
            raise InvalidArgument(
                f"the state has no offset for bucket {missing[0]}, which is read here; pass the "
                "states of all ranks, as a list, or the state of the whole loader"
            )
        self._offsets = {bucket: self._offsets[bucket] for bucket in own}
        return self._iterate()

    def _iterate(self) -> Iterator[pa.RecordBatch]:
        idle_since, pause = time.monotonic(), _POLL_SECONDS
        while self._offsets:
            found = False
            for bucket in list(self._offsets):
                read = self._read(bucket)
                progressed = read.reached > self._offsets[bucket]
                self._offsets[bucket] = max(self._offsets[bucket], read.reached)
                found = found or progressed
                if read.rows.num_rows:
                    yield read.rows
            if found:
                idle_since, pause = time.monotonic(), _POLL_SECONDS
                continue
            if self._idle_timeout is not None:
                if time.monotonic() - idle_since >= self._idle_timeout:
                    return
            time.sleep(pause)
            pause = min(_LONGEST_POLL_SECONDS, pause * 1.5)

    def _read(self, bucket: int) -> LiveRead:
        """Read the next records of a bucket; raise if records were lost or removed by a restore."""
        offset = self._offsets[bucket]
        read: LiveRead = self._rows.get().read(bucket, offset, self._options.batch_size)
        epoch = self._epochs.setdefault(bucket, read.epoch)
        if read.epoch != epoch:
            if self._rows.get().unchanged_until(bucket, epoch, read.epoch) < offset:
                raise StorageError(
                    f"bucket {bucket} of {self._place} was restored to an older version since the "
                    "stream read it, or lost records that were not flushed; its offsets now mean "
                    "other records. Start with a new stream"
                )
            self._epochs[bucket] = read.epoch
        if offset and read.start > offset:
            raise OffsetOutOfRange(
                f"offsets {offset} to {read.start - 1} of bucket {bucket} of {self._place} were "
                "removed by retention before the stream read them"
            )
        if offset > read.end:
            raise StorageError(
                f"bucket {bucket} of {self._place} ends at offset {read.end}, and the stream had "
                f"reached {offset}: records that were read before they were durable were lost"
            )
        return read

    # State

    def state(self, batches: int = 0) -> dict[str, Any]:
        """Return the next offsets of the buckets of this rank, or of this worker.

        A loaded state may have those of other ranks, which continue without this one.
        """
        if batches:
            raise InvalidArgument(
                "state_dict(batches=…) needs a tag or a fixed version: what follow=True will read "
                "is not known in advance"
            )
        offsets = {b: self._offsets[b] for b in self._own(None) if b in self._offsets}
        return stream_state.encode(
            FollowState(
                topic=self._topic_id,
                where=stream_state.condition_of(self._options.where),
                offsets={str(b): offset for b, offset in offsets.items()},
                epochs={str(b): self._epochs[b] for b in offsets if self._epochs.get(b)},
            )
        )

    def load(self, given: Any) -> None:
        """Continue at a state of this rank, or at the states of all ranks of any world size."""
        states = []
        for part in given if isinstance(given, list) else [given]:
            if loader_state.is_of_loader(part):
                inside, skipped = loader_state.stream_states(part)
                if skipped:
                    raise InvalidArgument(
                        "with follow=True, create the StatefulDataLoader with "
                        "snapshot_every_n_steps=1: this state is older than what was delivered"
                    )
                states += inside
            else:
                states.append(part)
        offsets: dict[int, int] = {}
        epochs: dict[int, int] = {}
        for part in states:
            state = self._checked(part)
            for bucket, offset in state.offsets.items():
                if offsets.get(int(bucket), offset) != offset:
                    raise InvalidArgument(
                        f"two of the states have bucket {bucket}, at offsets "
                        f"{offsets[int(bucket)]} and {offset}; pass one state for each rank, all "
                        "of one run"
                    )
            offsets |= {int(b): offset for b, offset in state.offsets.items()}
            # At offset 0 nothing was read that a restore could have removed.
            epochs |= {int(b): state.epochs.get(b, 0) for b, at in state.offsets.items() if at}
        self._offsets, self._epochs = offsets, epochs

    def _checked(self, given: Any) -> FollowState:
        state = stream_state.decode(given, FollowState)
        if state.topic != self._topic_id:
            raise InvalidArgument(
                f"the state is of another topic: its id is {state.topic!r}, that of "
                f"{self._place} is {self._topic_id!r}"
            )
        if state.where != stream_state.condition_of(self._options.where):
            raise InvalidArgument(
                f"the state was taken with where={state.where!r}, but this stream has "
                f"where={self._options.where!r}"
            )
        if not all(b.isdecimal() and offset >= 0 for b, offset in state.offsets.items()):
            raise InvalidArgument(f"the state has impossible offsets: {state.offsets}")
        return state
