"""Topics that this process owns: each is open once, shared by all its writers and readers here."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from persisting import fs as filesystem
from persisting.backends.fairness import KeyedLocks
from persisting.backends.log_puts import Part, put_to_log, queue_for_log, share_log
from persisting.backends.persisting import (
    PersistingBackend,
    new_owner_log,
    new_store_owner_log,
)
from persisting.backends.table_backend import TableBackend
from persisting.bucket.bucket import Bucket
from persisting.bucket.owner_log import OwnerLog, remove_unused
from persisting.bucket.producer_sequences import check_number, check_writer
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import SharedSchema
from persisting.bucket.snapshot import Page
from persisting.bucket.store_bucket import StoreBucket
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.concurrency.coalesced import weak_callback
from persisting.concurrency.loop_bridge import LoopWaiter, ThreadWaiter
from persisting.concurrency.pool import in_thread, in_thread_or_undo
from persisting.errors import (
    BucketClosed,
    BucketLocked,
    InvalidArgument,
    OwnershipLost,
    SchemaError,
    StorageError,
)
from persisting.fs import FileSystem
from persisting.lock import file_lock, noting
from persisting.records import EMPTY, Rules
from persisting.records.arrow import check_defaults
from persisting.store.object_store import ObjectStore
from persisting.store_address import StoreAddress
from persisting.topic import spec as topics
from persisting.topic import store_config
from persisting.topic.address import TopicAddress
from persisting.topic.backend_adapter import (
    BucketBackend,
    adapt,
    keeps_schema,
    put_rows,
    run_table_call,
)
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.configured import ConfiguredTopic
from persisting.topic.groups import FOLDER as GROUPS_FOLDER
from persisting.topic.registry import get_backend_class
from persisting.topic.spec import TopicConfig, TopicSpec
from persisting.topic.stream_position import StreamPosition
from persisting.topic.table_calls import T, TableCall

_T = TypeVar("_T")
_PAUSE_SECONDS = 0.01


class BucketsTaken(BucketLocked):
    """Other processes own some buckets of a put; the parts for all others are stored."""

    def __init__(self, left: list[tuple[int, Rows]], first: BucketLocked) -> None:
        super().__init__(first.summary, first.owner, hint=first.hint)
        self.left = left


class Listener(Protocol):
    """Answers other processes about the buckets of a topic that this process owns."""

    def start(self) -> str | None:
        """Listen, and return the address that the locks note; may be called again. Blocking."""

    async def refuse(self) -> None:
        """Stop answering calls about buckets, and wait until none is under way."""

    async def stop(self) -> None:
        """Stop listening and end all connections."""

    async def start_over(self) -> None:
        """Call :meth:`LocalTopic.start_over`; it continues even if the caller is cancelled."""

    def start_over_soon(self) -> None:
        """The same in the background, from any thread."""


Listening: TypeAlias = "Callable[[LocalTopic], Listener]"


class LocalTopic:
    """An open topic that this process owns; each bucket is opened when it is first used."""

    def __init__(
        self,
        address: TopicAddress,
        config: TopicConfig,
        cls: type,
        store: ObjectStore | None = None,
    ) -> None:
        """``store`` is that of a topic in an object store."""
        self.address, self.config, self.backend_class = address, config, cls
        self.store = store
        self.handles = 0
        self.closed = False
        self.listener: Listener | None = None
        self.listening_at: str | None = None
        """The address that the locks, or the lease, of the buckets note."""
        self.opening: set[int] = set()
        """The buckets that are being opened."""
        self._reconfiguring = 0
        self._counting = threading.Lock()
        self._backends: dict[int, BucketBackend] = {}
        self._log: OwnerLog | StoreOwnerLog | None = None
        self._producer_locks = KeyedLocks()
        self._sequences: dict[int, dict[str, int]] = {}
        """By bucket, producer sequences for a backend that stores none; reopening keeps them."""
        self._guard = threading.Lock()
        self._opening_in_store: dict[int, threading.Lock] = {}

    @property
    def folder(self) -> Path | None:
        return self.address.folder

    async def backend(self, bucket: int) -> BucketBackend:
        """Return the bucket's backend, which is opened in a thread the first time."""
        while self._reconfiguring:  # noqa: ASYNC110 (short, and from any event loop)
            await asyncio.sleep(_PAUSE_SECONDS)
        backend = self._backends.get(bucket)
        if backend is not None:
            return backend
        return await in_thread(self._open, bucket)

    async def _backends_of(self, buckets: list[int]) -> list[BucketBackend]:
        """Return the backends of several buckets; in an object store they are opened in
        parallel."""
        if self.store is not None:
            missing = [bucket for bucket in buckets if bucket not in self._backends]
            opened = await asyncio.gather(
                *(self.backend(bucket) for bucket in missing), return_exceptions=True
            )
            for result in opened:
                if isinstance(result, BaseException):
                    raise result
        return [await self.backend(bucket) for bucket in buckets]

    @property
    def notes_owners(self) -> bool:
        """Whether it is noted who owns the buckets: in their locks, or in an object store."""
        in_memory = self.folder is None and self.store is None
        return not in_memory and issubclass(self.backend_class, TableBackend)

    @property
    def buckets_open(self) -> list[int]:
        """The buckets that this process owns now."""
        return sorted(self._backends)

    def open_backend(self, bucket: int) -> BucketBackend | None:
        """Return the bucket's backend if it is open and stays so."""
        return None if self._reconfiguring else self._backends.get(bucket)

    def is_lost(self, bucket: int) -> bool:
        """Whether a bucket in an object store is open here, and another process has taken it
        over."""
        if self.store is None:
            return False
        backend = self._backends.get(bucket)
        core = backend.bucket if isinstance(backend, TableBackend) else None
        return isinstance(core, StoreBucket) and bool(core.lost)

    def _after_loss(self) -> None:
        if self.listener is not None:
            self.listener.start_over_soon()

    def store_bucket(self, bucket: int) -> StoreBucket | None:
        """Return a bucket in an object store if it is open and stays so."""
        backend = self.open_backend(bucket)
        core = backend.bucket if isinstance(backend, TableBackend) else None
        return core if isinstance(core, StoreBucket) else None

    def _check_open(self) -> None:
        if self.closed:
            raise BucketClosed(f"topic {self.config.topic!r} was closed; open it again")

    def _open(self, bucket: int) -> BucketBackend:
        if self.store is not None:
            return self._open_in_store(bucket)
        with self._guard:
            self._check_open()
            if bucket not in self._backends:
                self._listen()
                self.opening.add(bucket)
                try:
                    with noting(**({"socket": self.listening_at} if self.listening_at else {})):
                        self._backends[bucket] = self._build(bucket)
                finally:
                    self.opening.discard(bucket)
            return self._backends[bucket]

    def _listen(self) -> None:
        if self.listener is not None:
            self.listening_at = self.listener.start()

    def _open_in_store(self, bucket: int) -> BucketBackend:
        """Like :meth:`_open`, but buckets are opened in parallel, since each waits for requests."""
        with self._guard:
            opening = self._opening_in_store.setdefault(bucket, threading.Lock())
        while True:
            with opening:
                with self._guard:
                    self._check_open()
                    if bucket in self._backends:
                        return self._backends[bucket]
                    self._listen()
                    config, log = self.config, self._owner_log()
                    self.opening.add(bucket)
                try:
                    try:
                        backend = self._build(bucket, log)
                    except StorageError:
                        with self._guard:
                            if self.closed or self._log is log:
                                raise
                        continue  # its log was closed meanwhile
                    with self._guard:
                        # Not if the topic was closed, or got other options, meanwhile.
                        if not self.closed and self.config is config and self._log is log:
                            self._backends[bucket] = backend
                            return backend
                finally:
                    self.opening.discard(bucket)
                if isinstance(backend, TableBackend):
                    backend.close_now()

    def _build(self, bucket: int, log: OwnerLog | StoreOwnerLog | None = None) -> BucketBackend:
        options = dict(self.config.options)
        path: Any = "" if self.folder is None else str(topics.bucket_folder(self.folder, bucket))
        if self.store is not None:
            path = self.store.address / topics.bucket_name(bucket)
            options["owner_log"] = log
        elif self.folder is not None and issubclass(self.backend_class, TableBackend):
            options["schema_path"] = self.folder / SCHEMA_FILE
            options["groups_path"] = self.folder / GROUPS_FOLDER
            if issubclass(self.backend_class, PersistingBackend) and options.get("enable_wal"):
                options["owner_log"] = self._owner_log()
        size = self.config.batch_size
        backend = self.backend_class(
            bucket_id=bucket, storage_path=path, batch_size=size, **options
        )
        return adapt(backend, size, self._sequences.setdefault(bucket, {}))

    def _owner_log(self) -> OwnerLog | StoreOwnerLog:
        """Return the log of this topic in this process, which is created for its first bucket."""
        if isinstance(self._log, StoreOwnerLog) and self._log.lost:
            self._log.retire(wait=False)  # nobody else can open or close a bucket meanwhile
            self._log = None
        if self._log is None or self._log.process != os.getpid():  # a fork gets its own
            options = {**self.config.options, "batch_size": self.config.batch_size}
            if self.store is not None:
                self._log = new_store_owner_log(
                    self.store,
                    self.config.num_buckets,
                    listening_at=self.listening_at or "",
                    on_lost=weak_callback(self, LocalTopic._after_loss),
                    **options,
                )
                return self._log
            assert self.folder is not None
            remove_unused(self.folder, filesystem.current())
            options["schema_path"] = self.folder / SCHEMA_FILE
            self._log = new_owner_log(self.folder, **options)
        return self._log

    @property
    def log_name(self) -> str:
        """The log of a topic in an object store in this process; empty if there is none."""
        log = self._log
        return log.name if isinstance(log, StoreOwnerLog) else ""

    def _retire_log(self) -> None:
        """Remove the log once its last bucket is closed; the next bucket gets a new one."""
        with self._guard:
            retired, self._log = self._log, None
        if isinstance(retired, StoreOwnerLog):
            # Only a topic that is closed waits until unused logs are removed: puts go on meanwhile.
            retired.retire(wait=self.closed)
        elif retired is not None:
            retired.retire()

    async def put_parts(
        self, parts: list[tuple[int, Rows]], sequence: ProducerSequence | None = None
    ) -> None:
        """Store rows in several buckets; return when all are acknowledged.

        Buckets with a log store all of the rows or none, even across a crash. Without a log each
        bucket stores its part by itself.
        """
        while True:
            backends = await self._backends_of([bucket for bucket, _ in parts])
            tables = [backend.bucket for backend in backends if isinstance(backend, TableBackend)]
            kinds = {type(rows) for _, rows in parts}
            if len(tables) < len(backends) or len(kinds) > 1:
                break
            try:
                for table in tables:
                    table.check_open()
                if not share_log(tables):
                    if self._log is None:
                        break
                    await self._close_stale(parts, tables)
                    continue
                logged = list(zip(tables, [rows for _, rows in parts], strict=True))
                return await self._put_to_log(logged, sequence)
            except BucketClosed:  # being reopened with other options
                if self.closed:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
        # Each part waits by itself for a bucket that is being reopened: repeating all of them would
        # store some twice.
        puts = [LocalBucketClient(self, b).put(rows, sequence) for b, rows in parts]
        results = await asyncio.gather(*puts, return_exceptions=True)
        locked = [
            result
            for result in results
            if isinstance(result, BucketLocked) and not isinstance(result, OwnershipLost)
        ]
        for result in results:
            if isinstance(result, BaseException) and result not in locked:
                raise result
        if locked:
            left = [part for part, r in zip(parts, results, strict=True) if r in locked]
            raise BucketsTaken(left, locked[0])

    async def _close_stale(self, parts: list[tuple[int, Rows]], tables: list[Bucket]) -> None:
        """Close buckets that are not in this topic's log: a change of options could not close them.

        If that fails again the put fails too: it could not be stored in all buckets or none.
        """
        for (bucket, _), table in zip(parts, tables, strict=True):
            log = self._log
            if log is not None and table.group_commit is not log.group_commit:
                await self.close_bucket(bucket)

    async def _put_to_log(self, parts: list[Part], sequence: ProducerSequence | None) -> None:
        if sequence is None:
            return await put_to_log(parts)
        check_writer(sequence[0])
        producer = sequence[0], check_number(sequence[1])
        # Held until the put has its place in the log: later numbers must not overtake it.
        async with self._producer_locks.of(producer[0]):
            acknowledged = await queue_for_log(parts, producer)
        if acknowledged is not None:
            await asyncio.shield(acknowledged)
        return None

    async def reconfigure(self, config: TopicConfig, cls: type) -> None:
        """Switch to another backend class or other options; buckets reopen when they are used."""
        if config != self.config or cls is not self.backend_class:
            with self._changing():
                await in_thread(self._switch, config, cls)
                await in_thread(self._retire_log)
                await self.close_buckets()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Open no bucket meanwhile."""
        with self._counting:
            self._reconfiguring += 1
        try:
            yield
        finally:
            with self._counting:
                self._reconfiguring -= 1

    async def start_over(self) -> None:
        """If a bucket in an object store was lost, close all buckets and their log. Each opens
        again, with a new log, when it is used."""
        if self.closed or not any(self.is_lost(bucket) for bucket in self.buckets_open):
            return
        log = self._log
        with self._changing():
            await in_thread(self._retire_log)
            try:
                await self.close_buckets()
            except BaseException:
                if isinstance(log, StoreOwnerLog):
                    log.give_up("its buckets could not be closed")  # once lost, they can
                raise

    def _switch(self, config: TopicConfig, cls: type) -> None:
        """Open buckets in the new way; the guard ensures that none is being opened meanwhile."""
        with self._guard:
            self.config, self.backend_class = config, cls

    async def close(self) -> None:
        """Flush and close all buckets; the topic cannot be used again."""
        self.closed = True
        try:
            await in_thread(self._wait_for_opening)
            if self.listener is not None:
                await self.listener.refuse()
            await self.close_buckets()
        except BaseException:
            self.closed = False
            raise
        await in_thread(self._retire_log)
        if self.listener is not None:
            # Until here others heard that this process is alive and about to release the locks.
            await self.listener.stop()

    def _wait_for_opening(self) -> None:
        """Wait until no bucket is being opened by a call that has not seen that the topic is
        closed. That may be slow if its log has to be recovered."""
        with self._guard:
            pass

    async def close_bucket(self, bucket: int) -> None:
        """Flush and close one bucket; the next use opens it again."""
        backend = self._backends.get(bucket)
        if backend is not None:
            # As a whole: a bucket that is closed and not forgotten could not be used again.
            await asyncio.shield(self._close_and_forget(bucket, backend))

    async def _close_and_forget(self, bucket: int, backend: BucketBackend) -> None:
        await backend.close()
        await in_thread(self._discard, bucket, backend)

    def _discard(self, bucket: int, backend: BucketBackend) -> None:
        """Forget a closed backend, unless the bucket has been opened again since."""
        with self._guard:
            if self._backends.get(bucket) is backend:
                del self._backends[bucket]

    async def close_buckets(self) -> None:
        """Flush and close every open bucket; a bucket that fails to close stays open."""
        failures = []
        for bucket in list(self._backends):
            try:
                await self.close_bucket(bucket)
            except Exception as exc:
                failures.append(exc)
        if failures:
            raise failures[0]


_live: dict[TopicAddress, LocalTopic] = {}
_live_guard = threading.Lock()
"""Held briefly, without I/O: event loops take it."""

_opening_guard = threading.Lock()
"""Held during I/O, in threads: topics are found or created one at a time."""

_topics_of_parent: list[LocalTopic] = []
"""Kept alive in a forked process, and never closed there: they belong to the parent."""


def _reset_after_fork() -> None:
    """Forget the topics on disk: a forked process does not own its parent's buckets."""
    global _live, _live_guard, _opening_guard
    _live_guard, _opening_guard = threading.Lock(), threading.Lock()
    _topics_of_parent.extend(t for t in _live.values() if not t.address.is_in_memory)
    _live = {key: topic for key, topic in _live.items() if key.is_in_memory}


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
        core = self._logged_bucket(bucket)
        try:
            waiter = None if core is None else core.enqueue_row(record, LoopWaiter)
        except BucketClosed:  # it is being reopened with other options
            return None
        return None if waiter is None else waiter.future

    def put_from_thread(self, bucket: int, record: dict[str, Any]) -> bool:
        """Store a plain record in an open bucket with a log, and wait for it.

        The thread writes and syncs the log itself if no other does, which saves two switches. The
        main thread leaves that to another: a signal handler could interrupt it there.
        """
        core = self._logged_bucket(bucket)
        writes_itself = threading.current_thread() is not threading.main_thread()
        try:
            if core is None:
                return False
            waiter = core.enqueue_row(record, ThreadWaiter, start=not writes_itself)
        except BucketClosed:  # it is being reopened with other options
            return False
        if waiter is None:
            return False
        group_commit = core.group_commit
        if writes_itself and group_commit is not None and not group_commit.write_if_idle():
            group_commit.start()  # many threads share the syncs of one
        waiter.result()
        return True

    def _logged_bucket(self, bucket: int) -> Bucket | None:
        """Return an open bucket with a log that has room."""
        backend = self._topic.open_backend(bucket)
        if not isinstance(backend, TableBackend):
            return None
        core = backend.bucket
        return None if core.group_commit is None or core.is_full else core

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
                address = self._topic.address
                if self._topic.handles == 0 and _live.get(address) is self._topic:
                    del _live[address]


class LocalBucketClient:
    """A bucket that this process owns."""

    def __init__(self, topic: LocalTopic, bucket: int) -> None:
        self._topic, self._bucket = topic, bucket

    async def _backend(self) -> BucketBackend:
        return await self._topic.backend(self._bucket)

    async def _on_backend(self, call: Callable[[BucketBackend], Awaitable[_T]]) -> _T:
        """Call the backend; if it is being reopened, wait and call the new one."""
        while True:
            backend = await self._backend()
            try:
                return await call(backend)
            except BucketClosed:
                if self._topic.closed:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    async def put(self, rows: Rows, sequence: ProducerSequence | None = None) -> None:
        if sequence is not None:
            await self._on_backend(lambda backend: backend.put_once(rows, *sequence))
        else:
            await self._on_backend(lambda backend: put_rows(backend, rows))

    @property
    def lost(self) -> str:
        """Why this process no longer owns the bucket, which is in an object store; empty while it
        does, as far as it knows."""
        core = self._topic.store_bucket(self._bucket)
        return "" if core is None else core.lost

    @property
    def overdue(self) -> str:
        """Why another process may have taken the bucket over unnoticed; empty while that cannot
        be."""
        core = self._topic.store_bucket(self._bucket)
        return "" if core is None else core.overdue

    async def keeps_schema(self) -> bool:
        """Whether all records of the bucket have one schema, so that Arrow holds them exactly."""
        return keeps_schema(await self._backend())

    async def end(self) -> int:
        """Return the offset after the last record."""
        return int((await self._backend()).end_offset())

    async def rows_within(self, offset: int, nbytes: int) -> int | None:
        """Return how many rows from ``offset`` take about ``nbytes``, None if that is not known."""

        async def ask(backend: BucketBackend) -> int | None:
            return backend.rows_within(offset, nbytes)

        return await self._on_backend(ask)

    async def epoch(self) -> int:
        """Return how many times the bucket was restored, or an owner without a log was killed."""
        return (await self._backend()).epoch()

    async def read(self, offset: int, limit: int | None) -> Page:
        return await self._on_backend(lambda backend: backend.read(offset, limit))

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        return await self._on_backend(lambda backend: backend.read_arrow(offset, limit))

    async def call(self, call: TableCall[T]) -> T:
        return await self._on_backend(lambda backend: run_table_call(backend, call))

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncGenerator[Page]:
        position = StreamPosition(offset, limit, epoch)
        while not position.at_limit:
            backend = await self._backend()
            try:
                async with aclosing(backend.get_pages(*position.window(block))) as stream:
                    async for page in stream:
                        yield page
                        if not position.advance(page):
                            return
            except BucketClosed:
                if self._topic.closed:
                    raise
            else:
                if not block or self._topic.closed:
                    return
            await asyncio.sleep(_PAUSE_SECONDS)  # the backend is being reopened

    async def wait(self, offset: int, epoch: int | None = None) -> None:
        await self._on_backend(lambda backend: backend.wait_beyond(offset, epoch))

    async def find(self, timestamp: int) -> int:
        return int(await (await self._backend()).offset_at(timestamp))

    async def last_number(self, writer: str) -> int:
        return (await self._backend()).last_number(writer)

    async def is_queued(self, sequence: ProducerSequence) -> bool:
        """Whether this put waits for the log."""
        backend = await self._backend()
        return isinstance(backend, TableBackend) and backend.bucket.is_queued(sequence)

    async def flush(self) -> None:
        await self._on_backend(lambda backend: backend.flush())

    async def stats(self) -> dict[str, Any]:
        backend = await self._backend()
        required = {"bucket_id": self._bucket, "total_count": backend.total_count()}
        return {**required, **await backend.stats()}


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
        with _live_guard:
            topic = _live.get(address)
            if topic is not None and topic.handles == 0:
                return None
            if topic is None:
                topic = LocalTopic(address, config, cls, store)
                if listening is not None and topic.notes_owners:
                    topic.listener = listening(topic)
                _live[address] = topic
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


def live_topics(name: str) -> list[LocalTopic]:
    """Return the topics of this name that are open in this process."""
    with _live_guard:
        return [topic for topic in _live.values() if topic.config.topic == name]


def live_topic(folder: Path | TopicAddress) -> LocalTopic | None:
    """Return the topic in ``folder`` if it is open in this process.

    A caller that asks often passes the address: resolving a path costs several system calls.
    """
    address = folder if isinstance(folder, TopicAddress) else TopicAddress.in_folder(folder)
    with _live_guard:
        return _live.get(address)


def live_in_store(address: StoreAddress) -> LocalTopic | None:
    """Return the topic at an address of an object store if it is open in this process."""
    with _live_guard:
        return _live.get(TopicAddress.in_store(address))


def live_bucket(
    place: Path | TopicAddress, bucket: int, *, is_elsewhere: bool = False
) -> LocalTopic | None:
    """Return the topic at ``place`` if it is open in this process and a reader may use the bucket.

    If other processes share the topic, or have owned the bucket (``is_elsewhere``), reading must
    not open the bucket here.
    """
    live = live_topic(place)
    if live is None or live.is_lost(bucket):
        return None
    may_open = live.listener is None and not is_elsewhere
    return live if may_open or live.open_backend(bucket) is not None else None


def hold_live(topic: LocalTopic) -> LocalHandle | None:
    """Return another handle on an open topic, None if it has just been closed."""
    with _live_guard:
        if _live.get(topic.address) is not topic or topic.handles == 0:
            return None
        topic.handles += 1
        return LocalHandle(topic)
