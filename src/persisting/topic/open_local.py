"""Opening topics in this process, for writing and for reading."""

from __future__ import annotations

import asyncio
import operator
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from persisting import fs as filesystem
from persisting.backends.persisting import PersistingBackend
from persisting.backends.table_backend import TableBackend
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.metrics import GroupMetrics
from persisting.options import DURABLE
from persisting.store.object_store import ObjectStore
from persisting.topic import spec as topics
from persisting.topic import store_membership
from persisting.topic.bucket_client import Topic
from persisting.topic.configured import ConfiguredTopic
from persisting.topic.groups import Membership, check_offset_mode
from persisting.topic.live_topics import live_named, live_topic
from persisting.topic.local_handle import hold_live, open_for_writing
from persisting.topic.reader import QueueReader
from persisting.topic.readonly import ReadonlyTopic
from persisting.topic.registry import backend_name, check_class, get_backend_class
from persisting.topic.spec import TopicSpec
from persisting.topic.store_membership import StoreMembership
from persisting.topic.topic_names import check_name
from persisting.topic.writer import QueueWriter
from persisting.wal.lease import LEASE_SECONDS

_T = TypeVar("_T")
_WAIT_STEP_SECONDS = 0.05


def topic_spec(
    topic: Any,
    *,
    bucket_column: str | None = None,
    num_buckets: int | None = None,
    batch_size: int | None = None,
    backend: str | type | None = None,
    backend_options: dict[str, Any] | None = None,
) -> tuple[TopicSpec, type | None]:
    """Return what a call asks of a topic, and the backend class if it passes one."""
    if backend is not None and not isinstance(backend, (str, type)):
        raise InvalidArgument(f"backend must be a name or a class, got {backend!r}")
    cls = check_class(backend) if isinstance(backend, type) else None
    wanted = TopicSpec(
        topic=topic,
        bucket_column=bucket_column,
        num_buckets=num_buckets,
        batch_size=batch_size,
        backend=None if backend is None else backend_name(backend),
        also=None if cls is None else cls.__name__,
        options=backend_options,
    )
    wanted.check()
    return wanted, cls


def durable_arguments(
    durable: Any, backend: str | type | None, options: dict[str, Any] | None
) -> tuple[str | type, dict[str, Any]]:
    """Return the backend and the options of a durable topic; raise for what contradicts it."""
    if durable is not True:
        raise InvalidArgument(f"durable must be True or False, got {durable!r}")
    if options is not None and not isinstance(options, dict):
        raise InvalidArgument(f"backend_options must be a dict, got {type(options).__name__}")
    backend = "persisting" if backend is None else backend
    if not issubclass(get_backend_class(backend), PersistingBackend):
        raise InvalidArgument(
            f"durable=True needs the backend 'persisting', got {backend!r}: leave out backend, or "
            "durable"
        )
    for name, value in DURABLE.items():
        if (options or {}).get(name, value) != value:
            raise InvalidArgument(
                f"durable=True means {name}={value!r}, but backend_options has "
                f"{name}={options[name]!r}: leave out one of them"  # type: ignore[index]
            )
    return backend, {**DURABLE, **(options or {})}


async def open_local_writer(
    wanted: TopicSpec, cls: type | None, storage_path: Any, writer_id: str | None
) -> QueueWriter:
    """Return a writer of a topic that this process owns."""
    return QueueWriter(await open_for_writing(wanted, storage_path, cls), writer_id=writer_id)


async def open_local_reader(
    wanted: TopicSpec, cls: type | None, storage_path: Any, options: ReaderOptions
) -> QueueReader:
    """Return a reader of a topic of this process, or of a topic on disk."""
    deadline = deadline_of(options.wait_for_topic)
    topic = await when_found(
        lambda: find_topic(wanted, cls, storage_path), deadline, _WAIT_STEP_SECONDS
    )
    return await open_reader(topic, options)


def deadline_of(wait_for_topic: bool | float) -> float | None:
    """Return until when to wait for a topic that does not exist; None means forever."""
    if not isinstance(wait_for_topic, (bool, int, float)) or not wait_for_topic >= 0:
        raise InvalidArgument(
            f"wait_for_topic must be True, False or a number of seconds, got {wait_for_topic!r}"
        )
    return None if wait_for_topic is True else time.monotonic() + wait_for_topic


async def when_found(
    find: Callable[[], Awaitable[_T]], deadline: float | None, step_seconds: float
) -> _T:
    """Return the topic that ``find`` returns; until the deadline, retry while there is none."""
    while True:
        try:
            return await find()
        except NoSuchTopic:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            await asyncio.sleep(step_seconds)


async def open_reader(topic: Topic, options: ReaderOptions) -> QueueReader:
    """Return a reader of an open topic, on its own or as a member of a group."""
    buckets, group = options.buckets, options.group
    try:
        chosen = buckets.of(topic.num_buckets)
        membership: Membership | StoreMembership | None = None
        if group is not None:
            if not buckets.all:
                raise InvalidArgument(
                    "the members of a group share all buckets of a topic; give either a group, or "
                    "bucket_id, bucket_ids or rank"
                )
            membership = await in_thread(_membership, topic, group, chosen)
        elif options.auto_commit:
            raise InvalidArgument("auto_commit needs a group: read_queue(…, group='name')")
    except BaseException:
        await topic.close()
        raise
    metrics = None
    if options.enable_metrics and group is not None:
        metrics = GroupMetrics(topic.name, group)
    return QueueReader(
        topic, chosen, membership=membership, auto_commit=options.auto_commit, metrics=metrics
    )


def _membership(topic: Topic, group: str, buckets: list[int]) -> Membership | StoreMembership:
    store: ObjectStore | None = getattr(topic, "store", None)
    if store is not None:
        assert isinstance(topic, ConfiguredTopic)
        store_membership.check_offset_mode(store, check_name("group", group))
        lease = topic.config.options.get("lease", LEASE_SECONDS)
        return StoreMembership(store, group, buckets, lease)
    if topic.folder is None:
        raise InvalidArgument(
            f"topic {topic.name!r} is in memory and cannot store a group's offsets; "
            "use the backend 'lance' or 'persisting'"
        )
    folder = Path(topic.folder)
    check_offset_mode(folder, group)
    return Membership(folder, group, buckets, filesystem.current())


class BucketChoice:
    """Which buckets a reader reads: some by number, a rank's share, or all."""

    def __init__(
        self,
        bucket_id: int | None = None,
        bucket_ids: list[int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if bucket_id is not None and bucket_ids is not None:
            raise InvalidArgument("give bucket_id or bucket_ids, not both")
        if (rank is None) != (world_size is None):
            raise InvalidArgument("rank needs world_size, and world_size needs rank")
        if rank is not None and (bucket_id is not None or bucket_ids is not None):
            raise InvalidArgument("give buckets or a rank, not both")
        self._ids = [bucket_id] if bucket_id is not None else _bucket_list(bucket_ids)
        self._rank, self._world = (
            _whole_number("rank", rank),
            _whole_number("world_size", world_size),
        )
        if self._rank is not None and self._world is not None:
            if not 0 <= self._rank < self._world:
                raise InvalidArgument(f"rank must be from 0 to world_size - 1, got {rank}")

    @property
    def all(self) -> bool:
        """Whether the caller has chosen nothing."""
        return self._ids is None and self._rank is None

    def of(self, num_buckets: int) -> list[int]:
        """Return the chosen buckets of a topic."""
        if self._rank is not None and self._world is not None:
            if self._rank >= num_buckets:
                warnings.warn(
                    f"rank {self._rank} of {self._world} has no bucket to read: the topic has "
                    f"{num_buckets}. Create it with at least as many buckets as there are ranks",
                    UserWarning,
                    stacklevel=2,
                )
            return [b for b in range(num_buckets) if b % self._world == self._rank]
        chosen = list(range(num_buckets)) if self._ids is None else list(self._ids)
        for bucket in chosen:
            if type(bucket) is not int or not 0 <= bucket < num_buckets:
                raise InvalidArgument(
                    f"bucket {bucket!r} does not exist; the topic has 0 to {num_buckets - 1}"
                )
        return sorted(set(chosen))


@dataclass(frozen=True)
class ReaderOptions:
    """How to read a topic, wherever its buckets live."""

    buckets: BucketChoice
    wait_for_topic: bool | float = False
    group: str | None = None
    auto_commit: bool = False
    enable_metrics: bool = False


def _bucket_list(bucket_ids: Any) -> list[int] | None:
    if bucket_ids is None:
        return None
    if not isinstance(bucket_ids, Iterable) or isinstance(bucket_ids, (str, bytes)):
        raise InvalidArgument(f"bucket_ids must be a list of buckets, got {bucket_ids!r}")
    listed = list(bucket_ids)
    if not listed:
        raise InvalidArgument("bucket_ids names no bucket; leave it out to read all")
    return listed


def _whole_number(name: str, value: Any) -> int | None:
    if isinstance(value, str):
        raise InvalidArgument(
            f"{name} must be a whole number, got the text {value!r}; write int({value!r})"
        )
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} must be a whole number, got {value!r}") from None


async def find_topic(wanted: TopicSpec, cls: type | None, storage_path: Any) -> Topic:
    """Return the topic that is open in this process, else the one on disk."""
    if storage_path is None:
        live = live_named(wanted.topic)
        if len(live) > 1:
            places = ", ".join(str(t.folder or t.address.store or "memory") for t in live)
            raise InvalidArgument(
                f"there are several open topics {wanted.topic!r} ({places}); choose one with "
                "storage_path"
            )
        if live:
            wanted.applied_to(live[0].config)
        handle = hold_live(live[0]) if live else None
        if handle is not None:
            return handle
    folder = topics.topic_folder(storage_path, wanted.topic)
    live_here = live_topic(folder)
    if live_here is not None:
        wanted.applied_to(live_here.config)
        handle = hold_live(live_here)
        if handle is not None:
            return handle
    config = await in_thread(topics.load, folder, filesystem.current())
    if config is None:
        in_memory = [t for t in live_named(wanted.topic) if t.address.is_in_memory]
        handle = hold_live(in_memory[0]) if in_memory else None
        if handle is not None:
            return handle
        missing = topics.no_such_topic(folder)
        raise NoSuchTopic(f"{missing} To wait for it, pass wait_for_topic=True")
    config = wanted.applied_to(config)
    if issubclass(cls or get_backend_class(config.backend), TableBackend):
        return ReadonlyTopic(folder, config)
    return await open_for_writing(wanted, storage_path, cls)
