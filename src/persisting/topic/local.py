"""Topics of this process: one owner for each, shared by all its writers and readers here."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from persisting import fs as filesystem
from persisting.backends.table_backend import TableBackend
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import SharedSchema
from persisting.bucket.snapshot import Page
from persisting.concurrency.pool import in_thread, in_thread_or_undo
from persisting.errors import BucketClosed, InvalidArgument, SchemaError, StorageError
from persisting.fs import FileSystem
from persisting.lock import file_lock
from persisting.records import EMPTY, Rules
from persisting.records.arrow import check_defaults
from persisting.topic import spec as topics
from persisting.topic.backend_adapter import custom_pages, wait_by_polling
from persisting.topic.bucket_client import TABLE_CALLS, ProducerSequence, Rows
from persisting.topic.groups import FOLDER as GROUPS_FOLDER
from persisting.topic.registry import get_backend_class
from persisting.topic.spec import TopicConfig, TopicSpec

_T = TypeVar("_T")
_PAUSE = 0.01


class LocalTopic:
    """An open topic: its buckets are opened when first used and belong to this process."""

    def __init__(self, key: str, folder: Path | None, config: TopicConfig, cls: type) -> None:
        self.key, self.folder, self.config, self.backend_class = key, folder, config, cls
        self.handles = 0
        self.closed = False
        self._pausing = 0
        self._backends: dict[int, Any] = {}
        self._marks: dict[tuple[int, str], int] = {}
        self._guard = threading.Lock()

    async def backend(self, bucket: int) -> Any:
        """The bucket's backend, opened in a thread the first time."""
        while self._pausing:  # noqa: ASYNC110 (short, and from any event loop)
            await asyncio.sleep(_PAUSE)
        found = self._backends.get(bucket)
        if found is not None:
            return found
        return await in_thread(self._open, bucket)

    def _open(self, bucket: int) -> Any:
        with self._guard:
            if self.closed:
                raise BucketClosed(f"topic {self.config.topic!r} was closed; open it again")
            if bucket not in self._backends:
                self._backends[bucket] = self._build(bucket)
            return self._backends[bucket]

    def _build(self, bucket: int) -> Any:
        options = dict(self.config.options)
        path = "" if self.folder is None else str(topics.bucket_folder(self.folder, bucket))
        if self.folder is not None and issubclass(self.backend_class, TableBackend):
            options["schema_path"] = self.folder / SCHEMA_FILE
            options["groups_path"] = self.folder / GROUPS_FOLDER
        return self.backend_class(
            bucket_id=bucket, storage_path=path, batch_size=self.config.batch_size, **options
        )

    async def put_marked(
        self, bucket: int, backend: Any, rows: Rows, mark: ProducerSequence
    ) -> None:
        """Store rows once per mark, also on a backend that keeps no marks (while it is open)."""
        if hasattr(backend, "put_once"):
            await backend.put_once(rows, *mark)
            return
        key = bucket, mark[0]
        if mark[1] > self._marks.get(key, -1):
            await _put_plain(backend, rows)
            self._marks[key] = max(mark[1], self._marks.get(key, -1))

    def last_number(self, bucket: int, backend: Any, writer: str) -> int:
        if hasattr(backend, "last_number"):
            return int(backend.last_number(writer))
        return self._marks.get((bucket, writer), -1)

    async def reconfigure(self, config: TopicConfig, cls: type) -> None:
        """Go on with another backend class or other options; the buckets reopen when used."""
        if config != self.config or cls is not self.backend_class:
            self._pausing += 1
            try:
                await in_thread(self._switch, config, cls)
                await self.close_buckets()
            finally:
                self._pausing -= 1

    def _switch(self, config: TopicConfig, cls: type) -> None:
        """From here on buckets open in the new way; under the guard none is just being opened."""
        with self._guard:
            self.config, self.backend_class = config, cls

    async def close(self) -> None:
        """Flush and close everything, for good."""
        with self._guard:
            self.closed = True
        try:
            await self.close_buckets()
        except BaseException:
            with self._guard:
                self.closed = False
            raise

    async def close_bucket(self, bucket: int) -> None:
        """Flush and close one bucket; it is opened again when it is used again."""
        backend = self._backends.get(bucket)
        if backend is not None:
            await _close(backend)
            self._backends.pop(bucket, None)

    async def close_buckets(self) -> None:
        """Flush and close every open bucket; what fails stays open."""
        failures = []
        for bucket in list(self._backends):
            try:
                await self.close_bucket(bucket)
            except Exception as exc:
                failures.append(exc)
        if failures:
            raise failures[0]


_live: dict[str, LocalTopic] = {}
_live_guard = threading.Lock()
"""Held for a moment only: event loops take it."""

_opening_guard = threading.Lock()
"""Held over the disk, in threads: topics are found or made one at a time."""

_of_the_parent: list[LocalTopic] = []
"""Kept as they are: to close them is the parent's."""


def _reset_after_fork() -> None:
    """A forked process owns no bucket that its parent opened."""
    global _live, _live_guard, _opening_guard
    _live_guard, _opening_guard = threading.Lock(), threading.Lock()
    _of_the_parent.extend(topic for topic in _live.values() if topic.folder is not None)
    _live = {key: topic for key, topic in _live.items() if topic.folder is None}


os.register_at_fork(after_in_child=_reset_after_fork)


class LocalHandle:
    """One writer's or reader's hold on a topic of this process, counted in ``handles``."""

    def __init__(self, topic: LocalTopic) -> None:
        self._topic = topic
        self._ports: dict[int, LocalBucketClient] = {}

    @property
    def name(self) -> str:
        return self._topic.config.topic

    @property
    def num_buckets(self) -> int:
        return self._topic.config.num_buckets

    @property
    def bucket_column(self) -> str:
        return self._topic.config.bucket_column

    @property
    def batch_size(self) -> int:
        return self._topic.config.batch_size

    @property
    def folder(self) -> Path | None:
        return self._topic.folder

    @property
    def config(self) -> TopicConfig:
        return self._topic.config

    async def open_bucket(self, bucket: int) -> None:
        """Own a bucket now, or raise."""
        await self._topic.backend(bucket)

    async def close_bucket(self, bucket: int) -> None:
        await self._topic.close_bucket(bucket)

    def port(self, bucket: int) -> LocalBucketClient:
        if bucket not in self._ports:
            self._ports[bucket] = LocalBucketClient(self._topic, bucket)
        return self._ports[bucket]

    async def reconfigure(self, config: TopicConfig, cls: type) -> None:
        await self._topic.reconfigure(config, cls)

    async def close(self) -> None:
        with _live_guard:
            self._topic.handles -= 1
            last = self._topic.handles == 0
        if last:
            try:
                await self._topic.close()
            except BaseException:
                with _live_guard:
                    self._topic.handles += 1
                raise
            with _live_guard:
                if self._topic.handles == 0 and _live.get(self._topic.key) is self._topic:
                    del _live[self._topic.key]


class LocalBucketClient:
    """A bucket of this process."""

    def __init__(self, topic: LocalTopic, bucket: int) -> None:
        self._topic, self._bucket = topic, bucket

    async def _backend(self) -> Any:
        return await self._topic.backend(self._bucket)

    async def _on_backend(self, call: Callable[[Any], Awaitable[_T]]) -> _T:
        """Call the backend; if it was closed to be reopened, the reopened one."""
        while True:
            backend = await self._backend()
            try:
                return await call(backend)
            except BucketClosed:
                if self._topic.closed:
                    raise
                await asyncio.sleep(_PAUSE)

    async def put(self, rows: Rows, mark: ProducerSequence | None = None) -> None:
        if mark is not None:
            await self._on_backend(
                lambda backend: self._topic.put_marked(self._bucket, backend, rows, mark)
            )
        else:
            await self._on_backend(lambda backend: _put_plain(backend, rows))

    async def keeps_schema(self) -> bool:
        """Whether all records of the bucket have one schema, so that Arrow holds them exactly."""
        return isinstance(await self._backend(), TableBackend)

    async def end(self) -> int:
        """The offset after the last record."""
        backend = await self._backend()
        return int(getattr(backend, "end_offset", backend.total_count)())

    async def epoch(self) -> int:
        """How often the bucket was restored to an older version."""
        backend = await self._backend()
        return backend.epoch() if isinstance(backend, TableBackend) else 0

    async def read(self, offset: int, limit: int | None) -> Page:
        return await self._on_backend(lambda b: _read(b, offset, limit))

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        return await self._on_backend(lambda b: _read_arrow(b, offset, limit))

    async def do(self, op: str, **args: Any) -> Any:
        return await self._on_backend(lambda b: _table_call(b, op, args))

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncIterator[Page]:
        left = limit
        while left is None or left > 0:
            backend = await self._backend()
            try:
                async with aclosing(_pages(backend, offset, left, block, epoch)) as stream:
                    async for page in stream:
                        yield page
                        if not page.rows:
                            return
                        epoch, offset = page.epoch, page.first + len(page.rows)
                        left = None if left is None else left - len(page.rows)
            except BucketClosed:
                if self._topic.closed:
                    raise
            if not block or self._topic.closed:
                return
            await asyncio.sleep(_PAUSE)  # the backend was closed to be reopened

    async def wait(self, offset: int, epoch: int = 0) -> None:
        await self._on_backend(lambda backend: _wait(backend, offset, epoch))

    async def find(self, timestamp: int) -> int:
        backend = await self._backend()
        if not hasattr(backend, "offset_at"):
            raise StorageError(
                f"{type(backend).__name__} keeps no times of arrival; seek by offset instead"
            )
        return int(await backend.offset_at(timestamp))

    async def last_number(self, writer: str) -> int:
        return self._topic.last_number(self._bucket, await self._backend(), writer)

    async def flush(self) -> None:
        await self._on_backend(lambda backend: backend.flush())

    async def stats(self) -> dict[str, Any]:
        backend = await self._backend()
        known = {"bucket_id": self._bucket, "total_count": backend.total_count()}
        return {**known, **await backend.stats()}


def _pages(backend: Any, offset: int, limit: int | None, block: bool, epoch: int | None) -> Any:
    if isinstance(backend, TableBackend):
        return backend.get_pages(offset, limit, block, epoch)
    return custom_pages(backend, offset, limit, block)


async def _read(backend: Any, offset: int, limit: int | None) -> Page:
    if isinstance(backend, TableBackend):
        return await backend.read(offset, limit)
    return Page(offset, await backend.get(offset, limit))


async def _read_arrow(backend: Any, offset: int, limit: int | None) -> Page:
    if isinstance(backend, TableBackend):
        return await backend.read_arrow(offset, limit)
    if hasattr(backend, "get_arrow"):
        return Page(offset, await backend.get_arrow(offset, limit))
    return Page(offset, pa.Table.from_pylist(await backend.get(offset, limit)))


async def _table_call(backend: Any, op: str, args: dict[str, Any]) -> Any:
    if op not in TABLE_CALLS:
        raise StorageError(f"there is no call {op!r}")
    if not hasattr(backend, op):
        raise StorageError(
            f"{type(backend).__name__} keeps no table, so it has no versions, search or upkeep; "
            "use the backend 'lance' or 'persisting'"
        )
    return await getattr(backend, op)(**args)


async def _wait(backend: Any, offset: int, epoch: int) -> None:
    if isinstance(backend, TableBackend):
        await backend.wait_beyond(offset, epoch)
    elif hasattr(backend, "wait_beyond"):
        await backend.wait_beyond(offset)
    else:
        await wait_by_polling(backend, offset)


async def _close(backend: Any) -> None:
    if hasattr(backend, "close"):
        await backend.close()
    else:
        await backend.flush()


async def _put_plain(backend: Any, rows: Rows) -> None:
    if not isinstance(rows, list):
        if hasattr(backend, "put_arrow"):
            await backend.put_arrow(rows)
        else:
            await backend.put_batch(rows.to_pylist())
    elif len(rows) == 1:
        await backend.put(rows[0])
    else:
        await backend.put_batch(rows)


async def open_for_writing(
    wanted: TopicSpec, storage_path: Any, backend_class: type | None
) -> LocalHandle:
    """A hold on the topic, which is made if it does not exist."""
    wanted.check()
    while True:
        held = await in_thread_or_undo(_undo_hold, _hold, wanted, storage_path, backend_class)
        if held is not None:
            break
        await asyncio.sleep(_PAUSE)
    handle, config, cls = held
    try:
        await handle.reconfigure(config, cls)
    except BaseException:
        await handle.close()
        raise
    return handle


def _undo_hold(held: tuple[LocalHandle, TopicConfig, type] | None) -> None:
    """The caller was cancelled: nobody will close the handle."""
    if held is None:
        return
    task = asyncio.get_running_loop().create_task(held[0].close())
    _undoing.add(task)
    task.add_done_callback(_undoing.discard)


_undoing: set[asyncio.Task[None]] = set()


def agreed_config(
    wanted: TopicSpec, storage_path: Any, backend_class: type | None = None
) -> tuple[Path | None, TopicConfig, bool]:
    """The topic's folder and configuration on disk, made or changed as wanted; blocking.

    The folder is None for a topic that is not there and shall be in memory. The last says whether
    a topic that was there changed.
    """
    fs = filesystem.current()
    folder = topics.topic_folder(storage_path, wanted.topic).resolve()
    known = topics.load(folder, fs)
    if known is None and wanted.backend in (None, "memory"):
        return None, wanted.new(), False
    config = wanted.new() if known is None else wanted.applied_to(known)
    _check_options(backend_class or get_backend_class(config.backend), wanted, config)
    _check_defaults(folder, wanted, fs)
    changed = known is not None and config != known
    if known is not None:
        topics.warn_of_changes(known, config)
    if config != known:
        config = _save(folder, wanted, config, fs)
    return folder, config, changed


def _check_options(cls: type, wanted: TopicSpec, config: TopicConfig) -> None:
    """Raise for wrong options before they are kept, where the class can tell."""
    if issubclass(cls, TableBackend):
        topics.refuse_openers(wanted.options or {})
        cls.check_options(batch_size=config.batch_size, **config.options)


def _check_defaults(folder: Path, wanted: TopicSpec, fs: FileSystem) -> None:
    """Raise for defaults that contradict the topic's fields, before they are kept."""
    defaults = (wanted.options or {}).get("schema_defaults")
    if defaults:
        known = SharedSchema(folder / SCHEMA_FILE, fs).read() or EMPTY
        try:
            check_defaults(known, Rules(evolving=True, defaults=defaults))
        except SchemaError as exc:
            raise InvalidArgument(f"schema_defaults: {exc}; give it one of its type") from exc


def _hold(
    wanted: TopicSpec, storage_path: Any, backend_class: type | None
) -> tuple[LocalHandle, TopicConfig, type] | None:
    """Find or make the topic, on disk and in this process; None while it is being closed."""
    with _opening_guard:
        folder, config, _ = agreed_config(wanted, storage_path, backend_class)
        key = f"memory:{wanted.topic}" if folder is None else str(folder)
        cls = backend_class or get_backend_class(config.backend)
        with _live_guard:
            topic = _live.get(key)
            if topic is not None and topic.handles == 0:
                return None
            if topic is None:
                topic = _live[key] = LocalTopic(key, folder, config, cls)
            elif folder is None:
                config = wanted.applied_to(topic.config)
                cls = topic.backend_class
                topics.warn_of_changes(topic.config, config)
            topic.handles += 1
            return LocalHandle(topic), config, cls


def _save(
    folder: Path, wanted: TopicSpec, config: TopicConfig, fs: filesystem.FileSystem
) -> TopicConfig:
    """Write the topic file; if another process has just made the topic, its own counts."""
    try:
        fs.make_folder(folder)
    except OSError as exc:
        raise StorageError(f"cannot make the topic's folder {folder}: {exc.strerror}") from exc
    with file_lock(folder / ".topic.lock"):
        made = topics.load(folder, fs)
        final = config if made is None else wanted.applied_to(made)
        if final != made:
            topics.save(folder, final, fs)
        return final


def live_topics(name: str) -> list[LocalTopic]:
    """The topics of this name that are open in this process."""
    with _live_guard:
        return [topic for topic in _live.values() if topic.config.topic == name]


def live_topic(folder: Path) -> LocalTopic | None:
    """The topic in ``folder`` if it is open in this process."""
    with _live_guard:
        return _live.get(str(folder.resolve()))


def hold_live(topic: LocalTopic) -> LocalHandle | None:
    """One more handle on an open topic, None if it has just been closed."""
    with _live_guard:
        if _live.get(topic.key) is not topic or topic.handles == 0:
            return None
        topic.handles += 1
        return LocalHandle(topic)
