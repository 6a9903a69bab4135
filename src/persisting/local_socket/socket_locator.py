"""Finding the process that owns a bucket by its note."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

from persisting.cluster.locator import LocalConnection, OwnerLocator, Patience
from persisting.cluster.service import BucketService
from persisting.cluster.transport import Connection, Unreachable
from persisting.cluster.wire import Request
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, BucketLocked, StorageError
from persisting.local_socket.connection import BucketConnection, Connections, WrongUser
from persisting.local_socket.frames import TOPIC
from persisting.local_socket.open_buckets import OpenBuckets
from persisting.local_socket.owner_notes import OwnerNotes, is_this_process
from persisting.lock import described
from persisting.topic.local import LocalTopic

HERE = "here"
OPEN_SECONDS = 8.0
"""How long another process may take to open a bucket before it is opened here."""


class NoOwner(StorageError):
    """Nobody owns the bucket, or its owner takes no connections; its files can be read."""


class SocketLocator(OwnerLocator):
    """The way to the process that owns a bucket."""

    def __init__(self, notes: OwnerNotes, bucket: int, connections: Connections) -> None:
        super().__init__(HERE)
        self._notes, self._bucket, self._connections = notes, bucket, connections
        self.pause_seconds = notes.pause_seconds
        self._holder: dict[str, Any] = {}
        """The note of the last owner that was found."""

    @property
    def _own_socket(self) -> str | None:
        """Where this process listens for the topic."""
        return None

    def local_service(self) -> BucketService | None:
        return None

    def _check_open(self) -> None:
        """Raise if this process has closed the topic."""

    async def _search(self, patience: Patience) -> Connection:
        while True:
            note = await in_thread(self._notes.read, self._bucket)
            self._holder = note or {}
            try:
                owner = await self._connect(note, patience)
                if owner is not None:
                    return owner
                failure = "its owner is about to start or to end"
            except (Unreachable, BucketClosed) as exc:
                self._check_open()
                if isinstance(exc, Unreachable):
                    owner = await self._instead_of_owner()
                    if owner is not None:
                        return owner
                failure = str(exc)
            if patience.exhausted:
                raise self._unavailable(failure)
            await asyncio.sleep(self.pause_seconds)

    async def _connect(self, note: dict[str, Any] | None, patience: Patience) -> Connection | None:
        """Return the way to the owner that a note names, None to search again."""
        if note is None:
            return await self._without_owner()
        if note.get("passing") or not note.get("pid") or note.get("clean"):
            return None  # held briefly, or the owner has not written its note yet
        path = note.get("socket")
        if path is None or path == self._own_socket:
            return await self._without_socket(note)
        try:
            owner = await self._connections.to(path)
            connection = BucketConnection(owner, self._bucket)
            reply = await connection.ask(Request("here"), self._notes.answer_seconds)
        except Unreachable:
            if note.get("host") != socket.gethostname():
                return await self._without_socket(note)
            raise
        except WrongUser as exc:
            return await self._without_socket(note, str(exc))
        if reply.value == "opening":
            patience.renew()
            return None
        return connection

    async def _without_owner(self) -> Connection | None:
        raise NoOwner("nobody owns the bucket")

    async def _instead_of_owner(self) -> Connection | None:
        """Take the place of an owner that cannot be reached, if it is dead."""
        return None

    async def _without_socket(
        self, note: dict[str, Any], reason: str = "it does not listen on a socket"
    ) -> Connection | None:
        """Act on an owner that takes no connections."""
        raise NoOwner(reason)

    def _unavailable(self, failure: str) -> StorageError:
        owner = f"the owner of bucket {self._notes.place(self._bucket)}"
        if self._holder.get("pid"):
            owner += f", process {self._holder['pid']},"
        return StorageError(
            f"{owner} does not answer: {failure}; check whether it is stopped or overloaded"
        )


class OwningLocator(SocketLocator):
    """A locator for a process that opens a bucket itself if nobody owns it."""

    def __init__(
        self,
        notes: OwnerNotes,
        bucket: int,
        connections: Connections,
        topic: LocalTopic,
        buckets: OpenBuckets,
    ) -> None:
        super().__init__(notes, bucket, connections)
        self._topic, self._buckets = topic, buckets

    def local_service(self) -> BucketService | None:
        return self._buckets.service(self._bucket)

    async def lost(self, exc: Exception, patience: Patience) -> None:
        self._check_open()
        await super().lost(exc, patience)

    def _check_open(self) -> None:
        if self._topic.closed:
            raise BucketClosed(f"topic {self._topic.config.topic!r} was closed; open it again")

    async def _search(self, patience: Patience) -> Connection:
        self._check_open()
        service = self.local_service()
        if service is not None:
            self._holder = {}
            return LocalConnection(service, self._here)
        return await super()._search(patience)

    @property
    def _own_socket(self) -> str | None:
        return self._topic.listening_at

    async def _without_owner(self) -> Connection | None:
        """Open the bucket where bucket 0 is open, so that the puts of all processes share one log
        and its syncs; open it here if that is not possible."""
        if self._bucket != 0 and self._topic.open_backend(0) is None:
            note = await self._owner_of_first()
            if note is None:
                # Not in an object store, where that takes many requests.
                if self._topic.store is None and not await self._open_here(0):
                    return None
            elif note.get("socket") and note["socket"] != self._own_socket:
                with suppress(Unreachable, StorageError):
                    owner = await self._connections.to(note["socket"])
                    await owner.ask(TOPIC, Request("open", {"bucket": self._bucket}), OPEN_SECONDS)
                    return BucketConnection(owner, self._bucket)
        return await self._opened_here()

    async def _owner_of_first(self) -> dict[str, Any] | None:
        """Return the note of bucket 0 in another process. Its own faults do not matter here."""
        if self._topic.store is None:
            return await in_thread(self._notes.read, 0)
        if self._topic.buckets_open:
            return None
        with suppress(StorageError):
            return await in_thread(self._notes.read, 0)
        return None

    async def _instead_of_owner(self) -> Connection | None:
        """In an object store, wait until its lease expires; a heartbeat shows that it is alive."""
        return None if self._topic.store is None else await self._opened_here()

    async def _opened_here(self) -> Connection | None:
        """Open the bucket in this process; None if another process was faster."""
        if not await self._open_here(self._bucket):
            return None
        service = self.local_service()
        return None if service is None else LocalConnection(service, self._here)

    async def _open_here(self, bucket: int) -> bool:
        """Open a bucket in this process; False if another process was faster."""
        try:
            if self._topic.is_lost(bucket) and self._topic.listener is not None:
                await self._topic.listener.start_over()
            await self._topic.backend(bucket)
        except BucketLocked as exc:
            if is_this_process(exc.owner) and not exc.owner.get("socket"):
                raise  # another object of this process has the bucket open
            return False
        return True

    async def _without_socket(
        self, note: dict[str, Any], reason: str = "it does not listen on a socket"
    ) -> Connection | None:
        if is_this_process(note):
            return await self._opened_here()
        owner = await self._instead_of_owner()
        if owner is not None:
            return owner
        hint = f"{reason}; {self._notes.elsewhere_hint}"
        if note.get("node"):
            hint = "it belongs to a cluster: pass a system of the cluster to write_queue"
        raise BucketLocked(
            f"bucket {self._notes.place(self._bucket)} is open for writing by {described(note)}",
            owner=note,
            hint=hint,
        )
