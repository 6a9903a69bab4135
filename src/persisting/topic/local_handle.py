"""Opening a topic in this process, and the handles on it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from persisting import fs as filesystem
from persisting.backends.table_backend import TableBackend
from persisting.bucket.bucket import Bucket
from persisting.bucket.group_commit import GroupCommit
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import SharedSchema
from persisting.concurrency.loop_bridge import LoopWaiter, ThreadWaiter
from persisting.concurrency.pool import in_thread_or_undo
from persisting.errors import BucketClosed, InvalidArgument, SchemaError, StorageError
from persisting.fs import FileSystem
from persisting.lock import file_lock
from persisting.records import EMPTY, Rules
from persisting.records.arrow import check_defaults
from persisting.store.object_store import ObjectStore
from persisting.topic import live_topics, store_config
from persisting.topic import spec as topics
from persisting.topic.address import TopicAddress
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.configured import ConfiguredTopic
from persisting.topic.local import Listening, LocalTopic
from persisting.topic.local_bucket import LocalBucketClient
from persisting.topic.registry import get_backend_class
from persisting.topic.spec import TopicConfig, TopicSpec

_PAUSE_SECONDS = 0.01

_opening_guard = threading.Lock()
"""Held during I/O, in threads: topics are found or created one at a time."""


def _reset_after_fork() -> None:
    global _opening_guard
    _opening_guard = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


class LocalHandle(ConfiguredTopic):
    """A writer's or reader's reference to a topic of this process, counted in ``handles``."""

    def __init__(self, topic: LocalTopic, changed: bool = False) -> None:
        self._topic = topic
        self.has_changed_topic = changed
        """Whether it was opened in a way that changed the configuration of an existing topic."""
        self._clients: dict[int, LocalBucketClient] = {}

    @property
    def topic(self) -> LocalTopic:
        return self._topic

    @property
    def folder(self) -> Path | None:
        return self._topic.folder

    @property
    def store(self) -> ObjectStore | None:
        return self._topic.store

    @property
    def config(self) -> TopicConfig:
        return self._topic.config

    def put_soon(self, bucket: int, record: dict[str, Any]) -> Awaitable[None] | None:
        """Queue a plain record for the log of an open bucket; return its acknowledgement."""
        found = self._logged_bucket(bucket)
        if found is None:
            return None
        core, log = found
        try:
            waiter = log.enqueue_row(core, record, LoopWaiter)
        except BucketClosed:  # it is being reopened with other options
            return None
        return None if waiter is None else waiter.future

    def put_from_thread(self, bucket: int, record: dict[str, Any]) -> bool:
        """Store a plain record in an open bucket with a log, and wait for it.

        The thread writes and syncs the log itself if no other does, which saves two switches. The
        main thread leaves that to another: a signal handler could interrupt it there.
        """
        found = self._logged_bucket(bucket)
        if found is None:
            return False
        core, log = found
        writes_itself = threading.current_thread() is not threading.main_thread()
        try:
            waiter = log.enqueue_row(core, record, ThreadWaiter, start=not writes_itself)
        except BucketClosed:  # it is being reopened with other options
            return False
        if waiter is None:
            return False
        if writes_itself and not log.write_if_idle():
            log.start()  # many threads share the syncs of one
        waiter.result()
        return True

    def _logged_bucket(self, bucket: int) -> tuple[Bucket, GroupCommit] | None:
        """Return an open bucket that has room, and its log."""
        backend = self._topic.open_backend(bucket)
        if not isinstance(backend, TableBackend):
            return None
        core = backend.bucket
        log = core.puts.group_commit
        return None if log is None or core.puts.is_full else (core, log)

    async def open_bucket(self, bucket: int) -> None:
        """Open a bucket now; raise if this process cannot own it."""
        await self._topic.backend(bucket)

    async def close_bucket(self, bucket: int) -> None:
        await self._topic.close_bucket(bucket)

    def bucket(self, bucket: int) -> LocalBucketClient:
        if bucket not in self._clients:
            self._clients[bucket] = LocalBucketClient(self._topic, bucket)
        return self._clients[bucket]

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> None:
        await self._topic.put_parts(parts, sequence)

    async def reconfigure(self, config: TopicConfig, cls: type) -> None:
        await self._topic.reconfigure(config, cls)

    async def close(self) -> None:
        if not live_topics.release(self._topic):
            return
        try:
            await self._topic.close()
        except BaseException:
            live_topics.undo_release(self._topic)
            raise
        live_topics.forget(self._topic)


async def open_for_writing(
    spec: TopicSpec,
    storage_path: Any,
    backend_class: type | None,
    listening: Listening | None = None,
    store: ObjectStore | None = None,
) -> LocalHandle:
    """Return a handle on a topic of this process; a topic that does not exist is created.

    ``listening`` creates the listener of a topic that other processes may share, if it has none
    yet.
    ``store`` is that of a topic in an object store, which has no ``storage_path``.
    """
    spec.check()
    while True:
        opened = await in_thread_or_undo(
            _undo_open, _open_handle, spec, storage_path, backend_class, listening, store
        )
        if opened is not None:
            break
        await asyncio.sleep(_PAUSE_SECONDS)
    handle, config, cls = opened
    try:
        await handle.reconfigure(config, cls)
    except BaseException:
        await handle.close()
        raise
    return handle


def _undo_open(opened: tuple[LocalHandle, TopicConfig, type] | None) -> None:
    """Close the handle: the caller was cancelled and will never see it."""
    if opened is None:
        return
    task = asyncio.get_running_loop().create_task(opened[0].close())
    _undoing.add(task)
    task.add_done_callback(_undoing.discard)


_undoing: set[asyncio.Task[None]] = set()


def agreed_config(
    spec: TopicSpec, storage_path: Any, backend_class: type | None = None
) -> tuple[Path | None, TopicConfig, bool]:
    """Return the topic's folder and its configuration after applying ``spec``. Blocking.

    The topic is created, or its file changed, where needed. The folder is None for a new topic in
    memory. The third value says whether an existing topic has changed.
    """
    fs = filesystem.current()
    folder = topics.topic_folder(storage_path, spec.topic).resolve()
    stored = topics.load(folder, fs)
    if stored is None and spec.backend in (None, "memory"):
        return None, spec.new(), False
    config = spec.new() if stored is None else spec.applied_to(stored)
    _check_options(backend_class or get_backend_class(config.backend), spec, config)
    _check_defaults(folder, spec, fs)
    changed = stored is not None and config != stored
    if stored is not None:
        topics.warn_of_changes(stored, config)
    if config != stored:
        config = _save(folder, spec, config, fs)
    return folder, config, changed


def _check_options(cls: type, spec: TopicSpec, config: TopicConfig) -> None:
    """Raise for invalid options before they are stored, if the class can check them."""
    if issubclass(cls, TableBackend):
        topics.refuse_opener_options(spec.options or {})
        cls.check_options(batch_size=config.batch_size, **config.options)


def _check_defaults(folder: Path, spec: TopicSpec, fs: FileSystem) -> None:
    """Raise for defaults that contradict the topic's fields, before they are stored."""
    defaults = (spec.options or {}).get("schema_defaults")
    if defaults:
        schema = SharedSchema(folder / SCHEMA_FILE, fs).read() or EMPTY
        try:
            check_defaults(schema, Rules(evolving=True, defaults=defaults))
        except SchemaError as exc:
            raise InvalidArgument(
                f"schema_defaults: {exc}; give a default of the field's type"
            ) from exc


def _open_handle(
    spec: TopicSpec,
    storage_path: Any,
    backend_class: type | None,
    listening: Listening | None,
    store: ObjectStore | None,
) -> tuple[LocalHandle, TopicConfig, type] | None:
    """Find or create the topic, on disk and in this process; None while it is being closed."""
    with _opening_guard:
        if store is not None:
            config, changed = store_config.agreed(spec, store)
            address = TopicAddress.in_store(store.address)
        else:
            folder, config, changed = agreed_config(spec, storage_path, backend_class)
            in_memory = TopicAddress.in_memory(spec.topic)
            address = in_memory if folder is None else TopicAddress.in_folder(folder)
        cls = backend_class or get_backend_class(config.backend)
        with live_topics.guard:
            topic = live_topics.live.get(address)
            if topic is not None and topic.handles == 0:
                return None
            if topic is None:
                topic = LocalTopic(address, config, cls, store)
                if listening is not None and topic.notes_owners:
                    topic.listener = listening(topic)
                live_topics.live[address] = topic
            elif address.is_in_memory:
                config = spec.applied_to(topic.config)
                cls = topic.backend_class
                topics.warn_of_changes(topic.config, config)
            topic.handles += 1
            return LocalHandle(topic, changed), config, cls


def _save(
    folder: Path, spec: TopicSpec, config: TopicConfig, fs: filesystem.FileSystem
) -> TopicConfig:
    """Write the topic file and return what it says.

    If another process has just created the topic, ``spec`` is applied to that one.
    """
    try:
        fs.make_folder(folder)
    except OSError as exc:
        raise StorageError(f"cannot create the topic's folder {folder}: {exc.strerror}") from exc
    with file_lock(folder / topics.LOCK_FILE):
        created = topics.load(folder, fs)
        final = config if created is None else spec.applied_to(created)
        if final != created:
            topics.save(folder, final, fs)
        return final


def hold_live(topic: LocalTopic) -> LocalHandle | None:
    """Return another handle on an open topic, None if it has just been closed."""
    return LocalHandle(topic) if live_topics.hold(topic) else None
