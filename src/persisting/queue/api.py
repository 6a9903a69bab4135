"""``write_queue`` and ``read_queue``, with the same arguments in one process and on a cluster."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, overload

from persisting.concurrency.await_first import await_first
from persisting.errors import InvalidArgument
from persisting.store_address import is_store_address
from persisting.topic.open_local import (
    BucketChoice,
    ReaderOptions,
    durable_arguments,
    open_local_reader,
    open_local_writer,
    topic_spec,
)
from persisting.topic.open_store import (
    open_store_reader,
    open_store_writer,
    refuse_options_of_stores,
    store_of,
)
from persisting.topic.reader import QueueReader
from persisting.topic.spec import TopicSpec
from persisting.topic.writer import QueueWriter, check_writer_id

if TYPE_CHECKING:
    from persisting.work.work_reader import WorkReader


@await_first("writer")
async def write_queue(
    system: Any = None,
    topic: str | None = None,
    bucket_column: str | None = None,
    num_buckets: int | None = None,
    batch_size: int | None = None,
    storage_path: str | None = None,
    backend: str | type | None = None,
    backend_options: dict[str, Any] | None = None,
    *,
    writer_id: str | None = None,
    durable: bool = False,
    local_socket: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> QueueWriter:
    """Open a topic for writing; a topic that does not exist is created.

    For an existing topic, omitted arguments come from the topic, and contradicting ones raise.

    Parameters
    ----------
    system
        A Pulsing actor system whose nodes own the buckets; None: this process owns them.
    topic : str
        Name of the topic and of its folder.
    bucket_column : str, optional
        The field that decides the bucket of a record (default: "id").
    num_buckets : int, optional
        Number of buckets, fixed when the topic is created (default: 4).
    batch_size : int, optional
        Rows per page of reads and transfers (default: 100).
    storage_path : str, optional
        Folder of the topics (default: "./queue_storage"). A topic in memory stores nothing there;
        if no backend is named, a warning says so. Or a prefix in an object store, such as
        "s3://bucket/prefix", see the explanation "Topics in object stores".
    backend : str | type, optional
        "memory" (default for a new topic), "lance", "persisting", a registered name, or a class.
    backend_options : dict, optional
        Options of the backend.
    writer_id : str, optional
        A name that outlives this writer: sequences of puts are stored under it, so that a put
        that is retried after a restart is stored once.
    durable : bool, optional
        Store the topic so that every acknowledged record survives power loss: the backend
        "persisting", with a log that is synced before each acknowledgement. An existing topic
        becomes durable for new records; arguments that contradict it raise.
    local_socket : bool, optional
        Share the topic with other processes of this user on this machine: reach the buckets that
        they own, and let them reach those of this process. False: a bucket of another process
        raises ``BucketLocked``.
    storage_options : dict, optional
        Credentials and settings of an object store; they are stored nowhere, and are not sent to
        other nodes of a system. Without them the environment decides.
    """
    system, topic = _system_and_topic(system, topic)
    check_writer_id(writer_id)
    in_memory_by_default = backend is None and not durable
    if durable is not False:
        backend, backend_options = durable_arguments(durable, backend, backend_options)
    wanted, cls = topic_spec(
        topic,
        bucket_column=bucket_column,
        num_buckets=num_buckets,
        batch_size=batch_size,
        backend=backend,
        backend_options=backend_options,
    )
    if is_store_address(storage_path):
        assert storage_path is not None
        if system is not None:
            from persisting.cluster.open_remote import open_remote_store_writer

            return await open_remote_store_writer(
                system, wanted, cls, storage_path, storage_options, writer_id
            )
        store = store_of(storage_path, topic, storage_options)
        if not local_socket:
            return await open_store_writer(wanted, cls, store, writer_id)
        from persisting.local_socket.open_shared import open_shared_store_writer

        return await open_shared_store_writer(wanted, cls, store, writer_id)
    refuse_options_of_stores(storage_options)
    if system is not None:
        from persisting.cluster.open_remote import open_remote_writer

        writer = await open_remote_writer(system, wanted, cls, storage_path, writer_id)
    elif local_socket:
        from persisting.local_socket.open_shared import open_shared_writer

        writer = await open_shared_writer(wanted, cls, storage_path, writer_id)
    else:
        writer = await open_local_writer(wanted, cls, storage_path, writer_id)
    if storage_path is not None and in_memory_by_default and writer.folder is None:
        warnings.warn(
            f"topic {topic!r} is in memory and stores nothing in {str(storage_path)!r}: its "
            "records are lost when this process ends. To store them, pass durable=True, or "
            "backend='persisting' or 'lance'; backend='memory' silences this warning",
            UserWarning,
            stacklevel=2,
        )
    return writer


@overload
async def read_queue(
    system: Any = None,
    topic: str | None = None,
    *,
    mode: Literal["work"],
    group: str,
    lease: float = 30.0,
    max_deliveries: int | None = None,
    ordered_by: str | None = None,
    priority: str | None = None,
    visible_at: str | None = None,
    breaker: bool | None = None,
    num_buckets: int | None = None,
    storage_path: str | None = None,
    backend: str | type | None = None,
    backend_options: dict[str, Any] | None = None,
    wait_for_topic: bool | float = False,
    enable_metrics: bool = False,
) -> WorkReader: ...


@overload
async def read_queue(
    system: Any = None,
    topic: str | None = None,
    bucket_id: int | None = None,
    bucket_ids: list[int] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_buckets: int | None = None,
    storage_path: str | None = None,
    backend: str | type | None = None,
    backend_options: dict[str, Any] | None = None,
    *,
    group: str | None = None,
    mode: Literal["offset"] = "offset",
    auto_commit: bool = False,
    wait_for_topic: bool | float = False,
    enable_metrics: bool = False,
    local_socket: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> QueueReader: ...


@await_first("reader")
async def read_queue(
    system: Any = None,
    topic: str | None = None,
    bucket_id: int | None = None,
    bucket_ids: list[int] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_buckets: int | None = None,
    storage_path: str | None = None,
    backend: str | type | None = None,
    backend_options: dict[str, Any] | None = None,
    *,
    group: str | None = None,
    mode: str = "offset",
    auto_commit: bool = False,
    wait_for_topic: bool | float = False,
    enable_metrics: bool = False,
    local_socket: bool = True,
    storage_options: dict[str, Any] | None = None,
    lease: float | None = None,
    max_deliveries: int | None = None,
    ordered_by: str | None = None,
    priority: str | None = None,
    visible_at: str | None = None,
    breaker: bool | None = None,
) -> QueueReader | WorkReader:
    """Open a topic for reading.

    Parameters
    ----------
    system
        A Pulsing actor system to read through; None: this process, or the files.
    topic : str
        Name of the topic. Without ``storage_path``, a topic that is open in this process or on the
        system is preferred to one in ``./queue_storage``.
    bucket_id, bucket_ids : optional
        Read these buckets only.
    rank, world_size : int, optional
        Read every ``world_size``-th bucket, starting with ``rank``.
    group : str, optional
        Read as a member of this consumer group, whose offsets are stored.
    mode : str, optional
        "offset" (default), or "work": every record is leased to one member, and acknowledged,
        retried or given up on its own. The members share all buckets.
    auto_commit : bool, optional
        In a group: commit what was returned before at the next read and at close.
    wait_for_topic : bool | float, optional
        Wait until the topic exists, or that many seconds, instead of raising.
    enable_metrics : bool, optional
        In a group: export its lag as a Prometheus metric at every commit; in mode "work" the
        numbers that the keeper of the group notes every few seconds.
    local_socket : bool, optional
        Read through the process that owns a bucket, if there is one on this machine. False: read
        the files only.
    storage_options : dict, optional
        Credentials and settings of an object store.
    lease : float, optional
        In mode "work": seconds until a record that was not acknowledged is delivered again
        (default: 30).
    max_deliveries : int, optional
        In mode "work": after this many deliveries a record goes to the topic ``<topic>.dead``
        (default: 5, or what the group has). The last value that a member gave applies.
    ordered_by : str, optional
        In mode "work": a field; records with equal values are delivered one after the other, in
        order. Fixed when the group is created, as are the next two.
    priority : str, optional
        In mode "work": a field with a number; of the records that can be delivered, those with a
        higher one come first.
    visible_at : str, optional
        In mode "work": a field with a point in time (a datetime, or seconds of Unix time) before
        which the record is not delivered.
    breaker : bool, optional
        In mode "work": slow the group down while most of its deliveries fail (default: True, or
        what the group has).
    """
    system, topic = _system_and_topic(system, topic)
    wanted, cls = topic_spec(
        topic, num_buckets=num_buckets, backend=backend, backend_options=backend_options
    )
    buckets = BucketChoice(bucket_id, bucket_ids, rank, world_size)
    work = {
        "lease": lease,
        "max_deliveries": max_deliveries,
        "ordered_by": ordered_by,
        "priority": priority,
        "visible_at": visible_at,
        "breaker": breaker,
    }
    given = {name: value for name, value in work.items() if value is not None}
    if mode == "work":
        if auto_commit or not local_socket or not buckets.all:
            raise InvalidArgument(
                "mode='work' has no bucket_id, bucket_ids, rank, auto_commit or "
                "local_socket=False: members share all buckets through the group's keeper"
            )
        given["enable_metrics"] = enable_metrics
        return await _open_work_reader(
            system, wanted, cls, storage_path, storage_options, group, given, wait_for_topic
        )
    if mode != "offset":
        raise InvalidArgument(f"mode must be 'offset' or 'work', got {mode!r}")
    if given:
        raise InvalidArgument(f"{', '.join(given)} needs mode='work'")
    options = ReaderOptions(buckets, wait_for_topic, group, auto_commit, enable_metrics)
    if is_store_address(storage_path):
        assert storage_path is not None
        _refuse_class(cls, storage_path)
        if system is not None:
            from persisting.cluster.open_remote import open_remote_reader

            return await open_remote_reader(
                system, wanted, cls, storage_path, options, storage_options
            )
        store = store_of(storage_path, topic, storage_options)
        if not local_socket:
            return await open_store_reader(wanted, store, options)
        from persisting.local_socket.open_shared import open_shared_store_reader

        return await open_shared_store_reader(wanted, store, options)
    refuse_options_of_stores(storage_options)
    if system is not None:
        from persisting.cluster.open_remote import open_remote_reader

        return await open_remote_reader(system, wanted, cls, storage_path, options)
    if local_socket:
        from persisting.local_socket.open_shared import open_shared_reader

        return await open_shared_reader(wanted, cls, storage_path, options)
    return await open_local_reader(wanted, cls, storage_path, options)


async def _open_work_reader(
    system: Any,
    wanted: TopicSpec,
    cls: type | None,
    storage_path: Any,
    storage_options: dict[str, Any] | None,
    group: Any,
    given: dict[str, Any],
    wait_for_topic: bool | float,
) -> WorkReader:
    from persisting.topic.topic_names import check_name
    from persisting.work.work_reader import WorkOptions

    if group is None:
        raise InvalidArgument("mode='work' needs a group: read_queue(…, group='name', mode='work')")
    options = WorkOptions(check_name("group", group), **given)
    options.check()
    in_store = is_store_address(storage_path)
    if in_store:
        _refuse_class(cls, storage_path)
    else:
        refuse_options_of_stores(storage_options)
    if system is not None:
        from persisting.cluster.remote_groups import open_remote_work_reader

        return await open_remote_work_reader(
            system, wanted, cls, storage_path, options, wait_for_topic, storage_options
        )
    from persisting.local_socket import socket_groups

    if in_store:
        store = store_of(storage_path, wanted.topic, storage_options)
        return await socket_groups.open_store_work_reader(wanted, store, options, wait_for_topic)
    return await socket_groups.open_shared_work_reader(
        wanted, cls, storage_path, options, wait_for_topic
    )


def _refuse_class(cls: type | None, storage_path: Any) -> None:
    if cls is not None:
        raise InvalidArgument(f"a topic at {storage_path} has no backend class; leave it out")


def _system_and_topic(system: Any, topic: Any) -> tuple[Any, str]:
    """Return both; without a system, the topic may be the first argument."""
    if isinstance(system, str) and topic is None:
        system, topic = None, system
    if topic is None:
        raise InvalidArgument("the argument topic is missing: write_queue(topic='name')")
    if system is not None and not hasattr(getattr(system, "_inner", system), "node_id"):
        raise InvalidArgument(
            f"system must be a Pulsing actor system, got {system!r}; without a system, pass "
            "arguments by name: write_queue(topic='name', …)"
        )
    return system, topic
