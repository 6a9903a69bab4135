"""``write_queue`` and ``read_queue``, with the same arguments in one process and on a cluster."""

from __future__ import annotations

import warnings
from typing import Any

from persisting.concurrency.await_first import await_first
from persisting.errors import InvalidArgument
from persisting.topic.open_local import (
    BucketChoice,
    ReaderOptions,
    durable_arguments,
    open_local_reader,
    open_local_writer,
    topic_spec,
)
from persisting.topic.reader import QueueReader
from persisting.topic.writer import QueueWriter, check_writer_id


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
        if no backend is named, a warning says so.
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
    auto_commit: bool = False,
    wait_for_topic: bool | float = False,
    enable_metrics: bool = False,
    local_socket: bool = True,
) -> QueueReader:
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
    auto_commit : bool, optional
        In a group: commit what was returned before at the next read and at close.
    wait_for_topic : bool | float, optional
        Wait until the topic exists, or that many seconds, instead of raising.
    enable_metrics : bool, optional
        In a group: export its lag as a Prometheus metric at every commit.
    local_socket : bool, optional
        Read through the process that owns a bucket, if there is one on this machine. False: read
        the files only.
    """
    system, topic = _system_and_topic(system, topic)
    wanted, cls = topic_spec(
        topic, num_buckets=num_buckets, backend=backend, backend_options=backend_options
    )
    buckets = BucketChoice(bucket_id, bucket_ids, rank, world_size)
    options = ReaderOptions(buckets, wait_for_topic, group, auto_commit, enable_metrics)
    if system is not None:
        from persisting.cluster.open_remote import open_remote_reader

        return await open_remote_reader(system, wanted, cls, storage_path, options)
    if local_socket:
        from persisting.local_socket.open_shared import open_shared_reader

        return await open_shared_reader(wanted, cls, storage_path, options)
    return await open_local_reader(wanted, cls, storage_path, options)


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
