"""A replay buffer over a live topic: durable records, sampled in several ways."""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from collections.abc import Sequence
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
from persisting.data.pin import topic_path
from persisting.data.random_numbers import RandomNumbers
from persisting.data.replay_groups import Groups
from persisting.data.replay_state import ReplayState
from persisting.data.row_cache import RowCache
from persisting.data.slots import Region, Slots
from persisting.data.sum_tree import SumTree
from persisting.errors import InvalidArgument, StorageError
from persisting.options import check_timeout
from persisting.records import EMPTY, Rules
from persisting.records.arrow import merge
from persisting.table.search import check_where
from persisting.topic import scan
from persisting.topic import spec as topics
from persisting.topic.open_local import open_local_writer, topic_spec
from persisting.topic.synchronous import SyncQueue, run_blocking

UNIFORM, RECENCY, PRIORITY = "uniform", "recency", "priority"
_SMALLEST = 1e-8
"""Added to priorities, so that no record is left out for good."""
_MOST_CONDITIONS = 8
_MOST_ROUNDS = 16
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
        A writer for :meth:`add`, if another process owns the topic: ``writer.sync()`` of a writer
        on a cluster. Default: this process opens the topic for writing when it first adds a record.
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
        self._folder = topic_path(path)
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
        self._live = LiveRows(self._folder)
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
        durable = {"enable_wal": True, "wal_sync_interval": 0.0}
        options = {**durable, **(given["backend_options"] or {})}
        self._open_writer(**{**given, "backend": "persisting", "backend_options": options})

    def _open_writer(self, **given: Any) -> SyncQueue:
        spec, cls = topic_spec(self._folder.name, **given)
        opened = run_blocking(open_local_writer(spec, cls, str(self._folder.parent), None))
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
            with self._lock:
                writer = self._writer or self._open_writer()
        try:
            writer.put(record)
        finally:
            self._refreshed_at = 0.0

    def __len__(self) -> int:
        """The number of records that can be sampled now."""
        with self._lock:
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
        """Return ``n`` random records, in random order; fewer if there are not as many to choose.

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
        request = _Request.checked(
            n, by, half_life, beta, where, group_by, group_size, replacement, task
        )
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                self._check_usable()
                self._refresh()
                choice = self._choice(request)
                is_enough = choice.count >= (1 if request.replacement else n)
                if is_enough or time.monotonic() >= deadline:
                    return self._sampled(request, choice)
            time.sleep(_POLL_SECONDS)

    def _sampled(self, request: _Request, choice: _Choice) -> Sample:
        places, chances = choice.draw(request.n, self._random, replacement=request.replacement)
        slots = choice.slots(places)
        if request.task is not None:
            self._taken_by(request.task)[slots] = True
        keys = self._slots.keys(slots)
        weights = np.ones(len(places))
        if len(places):
            weights = (chances * choice.count) ** -request.beta
            weights /= weights.max()
        return Sample(keys, self._rows(keys), np.repeat(weights, len(slots) // max(1, len(places))))

    def _rows(self, keys: np.ndarray) -> Any:
        schema = self._schema
        if self._columns is not None:
            missing = [name for name in self._columns if name not in schema.names]
            if missing and len(keys):
                names = ", ".join(map(repr, schema.names)) or "none"
                raise InvalidArgument(f"columns names {missing[0]!r}; the fields are: {names}")
            schema = pa.schema([schema.field(n) for n in self._columns if n in schema.names])
        rows = self._cache.take(*self._slots.places(keys), schema, self._defaults)
        return to_batch(rows, self._format)

    def _choice(self, request: _Request) -> _Choice:
        """Return what a sample is drawn from."""
        eligible = self._eligible(request)
        if request.group_by is not None:
            return self._choice_of_groups(request, eligible)
        if eligible is None and request.by == PRIORITY:
            return _TreeChoice(self._tree, self._slots.live)
        if eligible is None and request.by == UNIFORM:
            return _UniformChoice(self._slots)
        weights = self._weights(request)
        return _ArrayChoice(weights if eligible is None else np.where(eligible, weights, 0.0))

    def _weights(self, request: _Request) -> np.ndarray:
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

    def _eligible(self, request: _Request) -> np.ndarray | None:
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

    def _choice_of_groups(self, request: _Request, eligible: np.ndarray | None) -> _GroupChoice:
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
        members = members[self._slots.is_live(members).all(axis=1)]
        slots = self._slots.of(members)
        weights = self._weights(request)[slots].mean(axis=1)
        if eligible is not None:
            weights = np.where(eligible[slots].all(axis=1), weights, 0.0)
        return _GroupChoice(weights, slots)

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
        if not np.isfinite(priorities).all() or (priorities < 0).any():
            wrong = priorities[~np.isfinite(priorities) | (priorities < 0)][0]
            raise InvalidArgument(f"a priority is a finite number from 0, got {wrong}")
        with self._lock:
            self._check_usable()
            buckets, offsets = self._slots.places(numbers)
            ends = np.array([region.end for region in self._slots.regions])
            if (numbers < 0).any() or (offsets >= ends[buckets]).any():
                raise InvalidArgument("a key is of no record that this buffer has sampled")
            left = self._slots.is_live(numbers)
            weights = (priorities[left] + _SMALLEST) ** self._alpha
            self._tree.set(self._slots.of(numbers[left]), weights)
            self._largest = max(self._largest, float(weights.max(initial=0.0)))
            return int(left.sum())

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
        """Raise if the records are not those that a state is about."""
        for bucket, snapshot in enumerate(snapshots):
            if snapshot.epoch != epochs[bucket]:
                raise StorageError(
                    f"bucket {bucket} of {self._folder} was restored to an older version: its "
                    "records are not those that this buffer knows. Create a new buffer"
                )
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
        with self._lock:
            self._check_usable()
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
            )
            return replay_state.save(self._folder, state, self._slots.live)

    def restore(self, value: Any) -> None:
        """Continue as after :meth:`checkpoint` returned ``value``.

        Records that were added since then are new, with the largest priority; those that retention
        has removed since then are gone. Nothing is written.
        """
        with self._lock:
            self._check_usable()
            state = replay_state.load(self._folder, value, self._live.topic_id)
            if state.alpha != self._alpha:
                raise InvalidArgument(
                    f"the checkpoint was taken with alpha={state.alpha}, this buffer has alpha="
                    f"{self._alpha}"
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
        """Remove a checkpoint that is not needed any more; return whether it existed."""
        return replay_state.remove(self._folder, value)

    # Closing

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
        with self._lock:
            if self._closed or self._owner != os.getpid():
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


@dataclass(frozen=True)
class _Request:
    """The arguments of a sample."""

    n: int
    by: str
    half_life: float | None
    beta: float
    where: str | None
    group_by: str | None
    group_size: int | None
    replacement: bool
    task: str | None

    @classmethod
    def checked(
        cls,
        n: int,
        by: str,
        half_life: float | None,
        beta: float,
        where: str | None,
        group_by: str | None,
        group_size: int | None,
        replacement: bool | None,
        task: str | None,
    ) -> _Request:
        check_count("n", n)
        check_where(where)
        if by not in (UNIFORM, RECENCY, PRIORITY):
            raise InvalidArgument(f"by must be one of 'uniform', 'recency', 'priority', got {by!r}")
        if (by == RECENCY) != (half_life is not None):
            raise InvalidArgument(f"by='recency' and half_life go together, got by={by!r}")
        if half_life is not None and not _is_positive(half_life):
            raise InvalidArgument(f"half_life must be a number of seconds, got {half_life!r}")
        if not isinstance(beta, (int, float)) or not 0 <= beta <= 1:
            raise InvalidArgument(f"beta must be a number from 0 to 1, got {beta!r}")
        if (group_by is None) != (group_size is None):
            raise InvalidArgument("group_by and group_size go together")
        if group_size is not None:
            check_count("group_size", group_size)
        if task is not None and (not isinstance(task, str) or not task):
            raise InvalidArgument(f"task must be a name, got {task!r}")
        if task is not None and replacement:
            raise InvalidArgument("a task takes each record once; leave out replacement=True")
        repeats = task is None if replacement is None else bool(replacement)
        return cls(n, by, half_life, beta, where, group_by, group_size, repeats, task)


def _is_positive(number: Any) -> bool:
    return isinstance(number, (int, float)) and math.isfinite(number) and number > 0


class _ArrayChoice:
    """Draws from an array of weights."""

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = weights
        self.count = int(np.count_nonzero(weights))
        """How many places have a chance."""

    def slots(self, places: np.ndarray) -> np.ndarray:
        return places

    def draw(
        self, n: int, random: RandomNumbers, *, replacement: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return places and the chance that each had in a single draw."""
        if not self.count:
            return np.zeros(0, np.int64), np.zeros(0)
        total = self._weights.sum()
        weights = self._weights
        places = _drawn(weights, n, random)
        if not replacement:
            n = min(n, self.count)
            places = _distinct(places)
            while len(places) < n:
                weights = weights.copy() if weights is self._weights else weights
                weights[places] = 0.0
                more = _distinct(_drawn(weights, n - len(places), random))
                places = np.concatenate([places, more])
        return places, self._weights[places] / total


class _GroupChoice(_ArrayChoice):
    """Draws groups; each stands for several slots."""

    def __init__(self, weights: np.ndarray, members: np.ndarray) -> None:
        super().__init__(weights)
        self._members = members

    def slots(self, places: np.ndarray) -> np.ndarray:
        result: np.ndarray = self._members[places].ravel()
        return result


class _TreeChoice:
    """Draws from all records by priority, without looking at each of them."""

    def __init__(self, tree: SumTree, count: int) -> None:
        self._tree, self.count = tree, count

    def slots(self, places: np.ndarray) -> np.ndarray:
        return places

    def draw(
        self, n: int, random: RandomNumbers, *, replacement: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        tree = self._tree
        if not self.count:
            return np.zeros(0, np.int64), np.zeros(0)
        if not replacement and n * 4 > self.count:
            return _ArrayChoice(tree.weights).draw(n, random, replacement=False)
        places = np.zeros(0, np.int64)
        for _ in range(_MOST_ROUNDS):
            found = tree.find(random.draw(n - len(places)) * tree.total)
            found = found[tree.weights[found] > 0]  # rounding may lead to an empty slot
            places = np.concatenate([places, found])
            places = places if replacement else _distinct(places)
            if len(places) == n:
                return places, tree.weights[places] / tree.total
        # A few records have nearly all the weight.
        return _ArrayChoice(tree.weights).draw(n, random, replacement=replacement)


class _UniformChoice:
    """Draws from all records, without looking at each of them."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self.count = slots, slots.live

    def slots(self, places: np.ndarray) -> np.ndarray:
        return self._slots.live_slots_at(places)

    def draw(
        self, n: int, random: RandomNumbers, *, replacement: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        count = self.count
        if not replacement and n * 4 > count:
            places = np.argsort(random.draw(count), kind="stable")[:n]
        else:
            places = np.zeros(0, np.int64)
            while len(places) < n and count:
                found = (random.draw(n - len(places)) * count).astype(np.int64)
                places = np.concatenate([places, found])
                places = places if replacement else _distinct(places)
        return places, np.full(len(places), 1 / max(1, count))


_Choice = _ArrayChoice | _TreeChoice | _UniformChoice


def _drawn(weights: np.ndarray, n: int, random: RandomNumbers) -> np.ndarray:
    sums = np.cumsum(weights)
    places = np.searchsorted(sums, random.draw(n) * sums[-1], side="right")
    last = int(np.flatnonzero(weights)[-1])  # rounding may lead beyond the end
    return np.minimum(places, last)


def _distinct(places: np.ndarray) -> np.ndarray:
    """Return each place once, in the order in which it occurs first."""
    _, first = np.unique(places, return_index=True)
    return places[np.sort(first)]
