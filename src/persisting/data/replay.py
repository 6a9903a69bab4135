"""A replay buffer over a live topic: durable records, sampled in several ways."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket.snapshot import Snapshot
from persisting.data import replay_state
from persisting.data.checks import check_columns, check_count
from persisting.data.formats import ARROW, NUMPY, PYTHON, TORCH, check_format, to_batch
from persisting.data.live_rows import LiveRows
from persisting.data.place import Place, place_of
from persisting.data.random_numbers import RandomNumbers
from persisting.data.replay_choices import (
    ArrayChoice,
    Choice,
    GroupChoice,
    TreeChoice,
    UniformChoice,
)
from persisting.data.replay_groups import Groups
from persisting.data.replay_request import PRIORITY, UNIFORM, SampleRequest
from persisting.data.replay_state import GroupPlaces, ReplayState
from persisting.data.row_cache import RowCache
from persisting.data.slots import Region, Slots
from persisting.data.sum_tree import SumTree
from persisting.errors import InvalidArgument, StorageError
from persisting.local_socket.open_shared import open_shared_writer
from persisting.options import DURABLE, check_timeout
from persisting.records import EMPTY, Rules
from persisting.records.arrow import merge
from persisting.topic import scan
from persisting.topic import spec as topics
from persisting.topic.open_local import topic_spec
from persisting.topic.synchronous import SyncQueue, run_blocking

_SMALLEST = 1e-8
"""Added to priorities, so that no record is left out for good."""
_LARGEST = 1e250
"""The largest weight, so that sums of weights are finite."""
_MOST_CONDITIONS = 8
_POLL_SECONDS = 0.02
_REFRESH_SECONDS = 0.05
_REFRESH_SHARE = 0.05
"""How often samples look for new records: after this time, and for at most this share of the time.
What this buffer has added is always seen."""


@dataclass(frozen=True)
class Sample:
    """Records that were sampled."""

    keys: np.ndarray
    """Identify the records, for :meth:`ReplayBuffer.update_priorities`."""
    rows: Any
    """The records, in the format of the buffer."""
    weights: np.ndarray
    """Importance weights, at most 1: they correct for unequal chances."""

    def __len__(self) -> int:
        return len(self.keys)


class ReplayBuffer:
    """Samples the records of a topic while it grows; retention of the topic limits its size.

    Records are durable as soon as they are added. What sampling depends on (priorities, which
    records a task has taken, random numbers) is in memory, and durable in every
    :meth:`checkpoint`. A buffer belongs to one process, and may be used by several threads.

    Parameters
    ----------
    path : str | Path
        The topic's folder. A topic that does not exist is created, with a log that is synced before
        a record is acknowledged.
    columns : list of str, optional
        The fields that samples have; default: all.
    format : str, optional
        What ``rows`` of a sample are: "arrow" (default), "python", "numpy" or "torch".
    seed : int, optional
        The seed of random numbers.
    alpha : float, optional
        The exponent of priorities: 0 makes all records equal, 1 samples in proportion.
    writer : optional
        A writer for :meth:`add`, if a node of a cluster owns the topic: ``writer.sync()`` of a
        writer on the cluster. Default: the buffer opens the topic for writing when it first adds a
        record, even while other processes of this machine write to it.
    num_buckets, bucket_column, backend_options : optional
        Of a topic that is created, as in ``write_queue``.
    cache_path : str | Path, optional
        Where a copy of the records is kept for quick access; default: the folder for temporary
        files. It takes as much space as the records do in memory.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: Sequence[str] | None = None,
        format: str = ARROW,
        seed: int = 0,
        alpha: float = 0.6,
        writer: SyncQueue | None = None,
        num_buckets: int | None = None,
        bucket_column: str | None = None,
        backend_options: dict[str, Any] | None = None,
        cache_path: str | Path | None = None,
    ) -> None:
        check_format(format, (ARROW, PYTHON, NUMPY, TORCH))
        check_count("seed", seed, least=0)
        if not isinstance(alpha, (int, float)) or not 0 <= alpha <= 10:
            raise InvalidArgument(f"alpha must be a number from 0 to 10, got {alpha!r}")
        self._format, self._columns, self._alpha = format, check_columns(columns), float(alpha)
        self._folder = _folder_of(path)
        self._writer, self._owns_writer = writer, False
        given = {
            "num_buckets": num_buckets,
            "bucket_column": bucket_column,
            "backend_options": backend_options,
        }
        if topics.load(self._folder, filesystem.current()) is None:
            self._create(given)
        elif any(value is not None for value in given.values()):
            name = next(name for name, value in given.items() if value is not None)
            raise InvalidArgument(
                f"{name} is for a new topic, and {self._folder} exists; change its options with "
                "write_queue"
            )
        self._live = LiveRows(Place(str(self._folder)))
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._closed = False
        self._refreshed_at, self._refresh_interval = 0.0, _REFRESH_SECONDS
        buckets = self._live.buckets
        self._cache = RowCache(buckets, cache_path)
        self._snapshots: list[Snapshot] = []
        self._schema, self._defaults = EMPTY, scan.defaults_of(self._folder)
        self._epochs: list[int] | None = None
        self._reset([Region() for _ in range(buckets)], RandomNumbers(seed))
        self._refresh()

    def _create(self, given: dict[str, Any]) -> None:
        """Create the topic, and keep it open for writing."""
        if self._writer is not None:
            raise InvalidArgument(f"there is no topic in {self._folder} that writer could write to")
        options = {**DURABLE, **(given["backend_options"] or {})}
        self._open_writer(**{**given, "backend": "persisting", "backend_options": options})

    def _open_writer(self, **given: Any) -> SyncQueue:
        spec, cls = topic_spec(self._folder.name, **given)
        opened = run_blocking(open_shared_writer(spec, cls, str(self._folder.parent), None))
        self._writer, self._owns_writer = opened.sync(), True
        return self._writer

    def _reset(self, regions: list[Region], random: RandomNumbers) -> None:
        """Forget everything about records; the next refresh finds them again."""
        self._slots = Slots(regions)
        self._tree = SumTree(self._slots.size)
        self._largest = 1.0
        self._random = random
        self._arrivals = np.zeros(self._slots.size, np.int64)
        self._taken: dict[str, np.ndarray] = {}
        self._matches: dict[str, _Matches] = {}
        self._groups: dict[tuple[str, int], Groups] = {}
        self._recency: tuple[float, np.ndarray] | None = None

    # Adding

    def add(self, record: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Put a record or a list of records into the topic; they are durable as its puts are."""
        self._check_usable()
        writer = self._writer
        if writer is None:
            with self._used():
                writer = self._writer or self._open_writer()
        try:
            writer.put(record)
        finally:
            self._refreshed_at = 0.0

    def __len__(self) -> int:
        """The number of records that can be sampled now."""
        with self._used():
            self._refresh()
            return self._slots.live

    # Sampling

    def sample(
        self,
        n: int,
        *,
        by: str = UNIFORM,
        half_life: float | None = None,
        beta: float = 0.4,
        where: str | None = None,
        group_by: str | None = None,
        group_size: int | None = None,
        replacement: bool | None = None,
        task: str | None = None,
        timeout: float = 0.0,
    ) -> Sample:
        """Return ``n`` random records, in random order; fewer if there are not that many.

        Parameters
        ----------
        n : int
            How many records, or with ``group_by`` how many groups.
        by : str, optional
            The chance of a record: "uniform"; "recency": half as much for every ``half_life``
            seconds that it arrived before the newest record; "priority": in proportion to its
            priority to the power of ``alpha``.
        half_life : float, optional
            For "recency", in seconds.
        beta : float, optional
            The exponent of the importance weights: 0 corrects nothing, 1 everything.
        where : str, optional
            Only records that match this SQL condition, such as "policy_version >= 41".
        group_by, group_size : optional
            Sample groups: as many records with one value of this field. Only complete groups are
            sampled, their records one after the other, and each of them must match ``where``. The
            field must be the topic's ``bucket_column``, unless the topic has one bucket.
        replacement : bool, optional
            Whether a record may occur twice in the sample. Default: True, without a task.
        task : str, optional
            The name of a consumer that takes each record once.
        timeout : float, optional
            Seconds to wait until there are ``n`` to choose from.
        """
        request = SampleRequest.checked(
            n, by, half_life, beta, where, group_by, group_size, replacement, task
        )
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        while True:
            with self._used():
                self._refresh()
                choice = self._choice(request)
                is_enough = choice.count >= (1 if request.replacement else n)
                if is_enough or time.monotonic() >= deadline:
                    return self._sampled(request, choice)
            time.sleep(_POLL_SECONDS)

    def _sampled(self, request: SampleRequest, choice: Choice) -> Sample:
        places, chances = choice.draw(request.n, self._random, replacement=request.replacement)
        slots = choice.slots(places)
        buckets, offsets = self._slots.located(slots)
        weights = np.ones(len(places))
        if len(places):
            weights = (chances * choice.count) ** -request.beta
            weights /= weights.max()
        if len(slots) > len(places):
            weights = np.repeat(weights, len(slots) // len(places))
        keys = self._slots.keys(buckets, offsets)
        sample = Sample(keys, self._rows(buckets, offsets), weights)
        if request.task is not None:  # only now: a sample that failed has taken nothing
            self._taken_by(request.task)[slots] = True
        return sample

    def _rows(self, buckets: np.ndarray, offsets: np.ndarray) -> Any:
        schema = self._schema
        if self._columns is not None:
            missing = [name for name in self._columns if name not in schema.names]
            if missing and len(offsets):
                names = ", ".join(map(repr, schema.names)) or "none"
                raise InvalidArgument(f"columns names {missing[0]!r}; the fields are: {names}")
            schema = pa.schema([schema.field(n) for n in self._columns if n in schema.names])
        rows = self._cache.take(buckets, offsets, schema, self._defaults)
        return to_batch(rows, self._format)

    def _choice(self, request: SampleRequest) -> Choice:
        """Return what a sample is drawn from."""
        eligible = self._eligible(request)
        if request.group_by is not None:
            return self._choice_of_groups(request, eligible)
        if eligible is None and request.by == PRIORITY:
            return TreeChoice(self._tree, self._slots.live)
        if eligible is None and request.by == UNIFORM:
            return UniformChoice(self._slots)
        weights = self._weights(request)
        return ArrayChoice(weights if eligible is None else np.where(eligible, weights, 0.0))

    def _weights(self, request: SampleRequest) -> np.ndarray:
        """Return the chance of every slot, not normalized; 0 for slots without a record."""
        if request.by == PRIORITY:
            return self._tree.weights
        live = np.zeros(self._slots.size)
        live[self._slots.live_slots()] = 1.0
        if request.by == UNIFORM:
            return live
        assert request.half_life is not None
        if self._recency is None or self._recency[0] != request.half_life:
            newest = int(self._arrivals.max(initial=0))
            ages = (newest - self._arrivals) / 1e6
            self._recency = request.half_life, live * np.exp2(-ages / request.half_life)
        return self._recency[1]

    def _eligible(self, request: SampleRequest) -> np.ndarray | None:
        """Return which slots may be sampled; None: all."""
        eligible = None
        if request.where is not None:
            eligible = self._matching(request.where)
        if request.task is not None:
            left = ~self._taken_by(request.task)
            eligible = left if eligible is None else eligible & left
        return eligible

    def _taken_by(self, task: str) -> np.ndarray:
        if task not in self._taken:
            self._taken[task] = np.zeros(self._slots.size, bool)
        return self._taken[task]

    def _matching(self, where: str) -> np.ndarray:
        """Return which slots match a condition. Only records that are new to it are evaluated."""
        matches = self._matches.pop(where, None)
        if matches is None:
            matches = _Matches(np.zeros(self._slots.size, bool), [0] * self._live.buckets)
        for bucket, region in enumerate(self._slots.regions):
            start = max(matches.ends[bucket], region.start)
            if start < region.end:
                snapshot = self._snapshots[bucket]
                offsets = self._live.matching(bucket, snapshot, start, region.end, where)
                span = self._slots.span(bucket, start, region.end)
                matches.slots[span.start + (offsets - start)] = True
                matches.ends[bucket] = region.end
        self._matches[where] = matches
        while len(self._matches) > _MOST_CONDITIONS:
            del self._matches[next(iter(self._matches))]
        return matches.slots

    def _choice_of_groups(self, request: SampleRequest, eligible: np.ndarray | None) -> GroupChoice:
        assert request.group_by is not None
        assert request.group_size is not None
        config = self._live.config
        if request.group_by != config.bucket_column and config.num_buckets > 1:
            raise InvalidArgument(
                f"group_by={request.group_by!r} must be the topic's bucket_column, which is "
                f"{config.bucket_column!r}, so that a group is in one bucket; create the topic "
                f"with bucket_column={request.group_by!r}"
            )
        if request.group_by not in self._schema.names and self._slots.live:
            names = ", ".join(map(repr, self._schema.names)) or "none"
            raise InvalidArgument(f"group_by={request.group_by!r}; the fields are: {names}")
        name = request.group_by, request.group_size
        if name not in self._groups:
            self._groups[name] = Groups(*name, self._live.buckets)
        groups = self._groups[name]
        groups.update(self._cache, self._slots)
        members = groups.keys()
        members = members[self._slots.is_live(*self._slots.places(members)).all(axis=1)]
        slots = self._slots.of(members)
        weights = self._weights(request)[slots].mean(axis=1)
        if eligible is not None:
            weights = np.where(eligible[slots].all(axis=1), weights, 0.0)
        return GroupChoice(weights, slots)

    def update_priorities(
        self, keys: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray
    ) -> int:
        """Set the priorities of records; return how many of them are still in the buffer.

        New records have the largest priority so far.
        """
        numbers, priorities = np.asarray(keys, np.int64), np.asarray(values, np.float64)
        if numbers.ndim != 1 or numbers.shape != priorities.shape:
            raise InvalidArgument(
                f"update_priorities takes one value for each key, got {numbers.shape} keys and "
                f"{priorities.shape} values"
            )
        if len(priorities) and not (priorities.min() >= 0 and priorities.max() < np.inf):
            wrong = priorities[~np.isfinite(priorities) | (priorities < 0)][0]
            raise InvalidArgument(f"a priority is a finite number from 0, got {wrong}")
        with self._used():
            places = self._slots.places(numbers)
            slots, left = self._slots.at(*places), self._slots.is_live(*places)
            if not left.all():
                if numbers.min(initial=0) < 0 or not self._slots.is_known(*places).all():
                    raise InvalidArgument("a key belongs to no record that this buffer has sampled")
                slots, priorities = slots[left], priorities[left]
            with np.errstate(over="ignore"):
                weights = (priorities + _SMALLEST) ** self._alpha
            largest = float(weights.max(initial=0.0))
            if largest > _LARGEST:
                raise InvalidArgument(
                    f"a priority to the power of alpha={self._alpha} is at most {_LARGEST:g}, got "
                    f"a priority of {priorities.max()}"
                )
            self._tree.set(slots, weights)
            self._largest = max(self._largest, largest)
            return len(slots)

    # Following the topic

    def _refresh(self) -> None:
        """Take in records that were added, and leave out those that retention has removed."""
        started = time.monotonic()
        if started - self._refreshed_at < self._refresh_interval:
            return
        snapshots = self._live.snapshots()
        if self._epochs is None:
            self._epochs = [snapshot.epoch for snapshot in snapshots]
        self._check_snapshots(snapshots, self._slots.regions, self._epochs)
        self._refreshed_at = time.monotonic()
        seconds = self._refreshed_at - started
        self._refresh_interval = min(1.0, max(_REFRESH_SECONDS, seconds / _REFRESH_SHARE))
        if self._is_unchanged(snapshots):
            return
        for bucket, snapshot in enumerate(snapshots):
            self._fill_cache(bucket, snapshot)
        self._snapshots = snapshots
        self._follow_slots(snapshots)
        self._recency = None

    def _is_unchanged(self, snapshots: list[Snapshot]) -> bool:
        regions = self._slots.regions
        if not self._snapshots:
            return False
        return all(
            (region.start, region.end) == (snapshot.start, snapshot.end)
            for region, snapshot in zip(regions, snapshots, strict=True)
        )

    def _check_snapshots(
        self, snapshots: list[Snapshot], regions: list[Region], epochs: list[int]
    ) -> None:
        """Raise if the records are not those of a state."""
        for bucket, snapshot in enumerate(snapshots):
            if snapshot.epoch != epochs[bucket]:
                unchanged = self._live.unchanged_until(bucket, epochs[bucket], snapshot.epoch)
                if unchanged < regions[bucket].end:
                    raise StorageError(
                        f"bucket {bucket} of {self._folder} was restored to an older version, or "
                        "lost records that were not flushed: its records are not those that this "
                        "buffer knows. Create a new buffer"
                    )
                epochs[bucket] = snapshot.epoch
            if snapshot.end < regions[bucket].end:
                raise StorageError(
                    f"bucket {bucket} of {self._folder} ends at offset {snapshot.end}, and the "
                    f"buffer knows records up to {regions[bucket].end}: they were lost before they "
                    "were durable. Create a new buffer"
                )

    def _fill_cache(self, bucket: int, snapshot: Snapshot) -> None:
        first = max(self._cache.end(bucket), snapshot.start)
        schema = merge(self._schema, snapshot.schema, Rules(evolving=True))
        names = list(snapshot.schema.names)
        for batch in scan.read_snapshot(snapshot, bucket, first, snapshot.end, names):
            rows, _, offsets, times = scan.divided(batch)
            arrivals = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
            self._cache.append(bucket, int(offsets[0].as_py()), rows, arrivals)
        self._cache.store(bucket)
        self._cache.drop(bucket, snapshot.start)
        self._schema = schema

    def _follow_slots(self, snapshots: list[Snapshot]) -> None:
        """Give new records a slot and the largest priority, and removed ones none."""
        before = copy.deepcopy(self._slots)
        changed = False
        for bucket, snapshot in enumerate(snapshots):
            changed |= self._slots.grow(bucket, snapshot.start, snapshot.end)
        if changed:
            self._slots.arrange()
            self._move(before)
        for bucket, region in enumerate(self._slots.regions):
            old = before.regions[bucket]
            if not changed and old.start < region.start:
                gone = self._slots.span(bucket, old.start, min(region.start, old.end))
                self._tree.set(np.arange(gone.start, gone.stop), 0.0)
            start = max(old.end, region.start)
            span = self._slots.span(bucket, start, region.end)
            if start < region.end:
                self._tree.set(np.arange(span.start, span.stop), self._largest)
                self._arrivals[span] = self._cache.arrivals(bucket, start, region.end)

    def _move(self, before: Slots) -> None:
        """Move everything that is stored by slot to the new layout."""
        size = self._slots.size

        def moved(array: np.ndarray) -> np.ndarray:
            result = np.zeros(size, array.dtype)
            for bucket, region in enumerate(self._slots.regions):
                old = before.regions[bucket]
                start, end = max(old.start, region.start), min(old.end, region.end)
                if start < end:
                    source = array[before.span(bucket, start, end)]
                    result[self._slots.span(bucket, start, end)] = source
            return result

        tree = SumTree(size)
        tree.fill(moved(self._tree.weights))
        self._tree = tree
        self._arrivals = moved(self._arrivals)
        self._taken = {task: moved(taken) for task, taken in self._taken.items()}
        for matches in self._matches.values():
            matches.slots = moved(matches.slots)

    # Checkpoints

    def checkpoint(self) -> dict[str, Any]:
        """Store the state of sampling durably, and return a small value that stands for it.

        Save the value, which JSON can hold, together with the trainer's checkpoint. The file stays
        until :meth:`remove_checkpoint`.
        """
        with self._used():
            assert self._epochs is not None
            state = ReplayState(
                topic=self._live.topic_id,
                regions=self._slots.regions,
                epochs=self._epochs,
                alpha=self._alpha,
                largest=self._largest,
                weights=replay_state.pack(self._tree.weights),
                taken={
                    task: replay_state.pack(np.packbits(taken))
                    for task, taken in self._taken.items()
                },
                seed=self._random.seed,
                drawn=self._random.drawn,
                groups=self._group_places(),
            )
            return replay_state.save(self._folder, state, self._slots.live)

    def _group_places(self) -> list[GroupPlaces]:
        found = []
        for (column, size), groups in self._groups.items():
            groups.update(self._cache, self._slots)
            found.append(GroupPlaces(column, size, replay_state.pack(groups.places(self._slots))))
        return found

    def restore(self, value: Any) -> None:
        """Continue as after :meth:`checkpoint` returned ``value``.

        Records that were added since then are new, with the largest priority; those that retention
        has removed since then are missing. Nothing is written.
        """
        with self._used():
            state = replay_state.load(self._folder, value, self._live.topic_id)
            if state.alpha != self._alpha:
                raise InvalidArgument(
                    f"the checkpoint was taken with alpha={state.alpha}, but this buffer has "
                    f"alpha={self._alpha}"
                )
            snapshots = self._live.snapshots()
            self._check_snapshots(snapshots, state.regions, state.epochs)
            for bucket, snapshot in enumerate(snapshots):
                self._fill_cache(bucket, snapshot)
            self._reset(state.regions, RandomNumbers(state.seed, state.drawn))
            self._epochs, self._largest = state.epochs, state.largest
            self._tree.fill(replay_state.unpack(state.weights, np.float64))
            for task, bits in state.taken.items():
                unpacked = np.unpackbits(replay_state.unpack(bits, np.uint8))
                self._taken[task] = unpacked[: self._slots.size].astype(bool)
            for formed in state.groups:
                groups = Groups(formed.column, formed.size, self._live.buckets)
                groups.restore(replay_state.unpack(formed.places, np.uint32), self._slots)
                self._groups[formed.column, formed.size] = groups
            for bucket, region in enumerate(state.regions):
                self._restore_arrivals(bucket, region)
            self._snapshots, self._refreshed_at = [], 0.0
            self._refresh()

    def _restore_arrivals(self, bucket: int, region: Region) -> None:
        """Set the arrival times of records that are left."""
        end = min(region.end, self._cache.end(bucket))
        arrivals = self._cache.arrivals(bucket, region.start, end)
        start = end - len(arrivals)
        self._arrivals[self._slots.span(bucket, start, end)] = arrivals

    def remove_checkpoint(self, value: Any) -> bool:
        """Remove a checkpoint that is no longer needed; return whether it existed."""
        return replay_state.remove(self._folder, value)

    # Closing

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Lock the buffer; raise if it cannot be used."""
        self._check_usable()  # first: a thread of the parent may have held the lock at a fork
        with self._lock:
            self._check_usable()
            yield

    def _check_usable(self) -> None:
        if self._closed:
            raise StorageError("the replay buffer is closed")
        if self._owner != os.getpid():
            raise StorageError(
                "this replay buffer belongs to the process that this one was forked from; create "
                "another one here"
            )

    def close(self) -> None:
        """Close the writer that this buffer has opened, and remove the copy of the records."""
        if self._owner != os.getpid():  # before the lock, which the fork may have left locked
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._cache.close()
            if self._owns_writer and self._writer is not None:
                self._writer.close()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()


@dataclass
class _Matches:
    """Which slots match a condition, and up to which offset each bucket was evaluated."""

    slots: np.ndarray
    ends: list[int]


def _folder_of(path: Any) -> Path:
    place = place_of(path)
    if place.is_in_store:
        raise InvalidArgument(
            f"a replay buffer needs a topic in a folder, and {place} is in an object store"
        )
    return Path(place.path)
