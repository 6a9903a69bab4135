"""Topics that this process owns, and their buckets; writers and readers here share them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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
from persisting.bucket.store_bucket import StoreBucket
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.concurrency.coalesced import weak_callback
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, BucketLocked, OwnershipLost, StorageError
from persisting.lock import noting
from persisting.store.object_store import ObjectStore
from persisting.topic import spec as topics
from persisting.topic.address import TopicAddress
from persisting.topic.backend_adapter import BucketBackend, adapt, put_rows
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.groups import FOLDER as GROUPS_FOLDER
from persisting.topic.spec import TopicConfig

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
        core = None if self.store is None else _store_bucket(self._backends.get(bucket))
        return core is not None and bool(core.lifecycle.lost)

    def _after_loss(self) -> None:
        if self.listener is not None:
            self.listener.start_over_soon()

    def store_bucket(self, bucket: int) -> StoreBucket | None:
        """Return a bucket in an object store if it is open and stays so."""
        return _store_bucket(self.open_backend(bucket))

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

    async def on_backend(self, bucket: int, call: Callable[[BucketBackend], Awaitable[_T]]) -> _T:
        """Call the bucket's backend; if it is being reopened, wait and call the new one."""
        while True:
            backend = await self.backend(bucket)
            try:
                return await call(backend)
            except BucketClosed:
                if self.closed:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    async def put(self, bucket: int, rows: Rows, sequence: ProducerSequence | None = None) -> None:
        """Store rows in one bucket."""
        if sequence is not None:
            await self.on_backend(bucket, lambda backend: backend.put_once(rows, *sequence))
        else:
            await self.on_backend(bucket, lambda backend: put_rows(backend, rows))

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
                    table.lifecycle.check_open()
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
        puts = [self.put(b, rows, sequence) for b, rows in parts]
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


def _store_bucket(backend: BucketBackend | None) -> StoreBucket | None:
    core = backend.bucket if isinstance(backend, TableBackend) else None
    return core if isinstance(core, StoreBucket) else None
