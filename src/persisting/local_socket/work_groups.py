"""Work groups of processes on one folder: one process keeps the group, the others call it.

The first process that opens a group keeps it: it holds the lock of the group's folder, whose note
names the socket. When it ends or dies, the next call of any member makes its process the keeper.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

from persisting import fs as filesystem
from persisting.cluster import wire
from persisting.cluster.locator import Patience
from persisting.cluster.transport import Answer, Unreachable
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, InvalidArgument, StorageError
from persisting.local_socket import frames, loop_thread
from persisting.local_socket.connection import Connections, WrongUser
from persisting.local_socket.server import TopicServer
from persisting.local_socket.shared_reader import SharedReaderTopic
from persisting.local_socket.shared_topic import SharedTopic
from persisting.lock import described, owner_of
from persisting.topic.bucket_client import Topic
from persisting.topic.local import open_for_writing
from persisting.topic.open_local import deadline_of, find_topic, topic_spec, when_found
from persisting.topic.spec import TopicConfig, TopicSpec
from persisting.work import dead_letters
from persisting.work.client import CALLS, ENDED_WITH_CALLER, answer
from persisting.work.keeper import Keeper, KeeperEnded, KeptElsewhere, journal_folder
from persisting.work.kept_group import KeptGroup
from persisting.work.open_group import (
    check_backend,
    check_mode,
    check_same_topic,
    folder_of,
    has_log,
)
from persisting.work.reader import WorkOptions, WorkReader

_WAIT_STEP_SECONDS = 0.05
_PAUSE_SECONDS = 0.02
_LONGEST_START_SECONDS = 300.0
"""A keeper may take this long to replay its journal and to look at the topic."""


class _Place(NamedTuple):
    """What a server needs to know of a topic."""

    folder: Path
    config: TopicConfig


class GroupServer(TopicServer):
    """Listens for the members of one group in other processes."""

    def __init__(self, place: _Place, on_failure: Callable[[], None]) -> None:
        """``on_failure`` is called when a member finds that the keeper has failed."""
        super().__init__(place)  # type: ignore[arg-type]
        self.keeper: Keeper | None = None
        self._on_failure = on_failure

    async def _begin(self) -> None:
        self._watch_listening()

    def put_soon(self, bucket: int, request: Request, waiter: Any) -> bool:
        return False

    def ends_with_caller(self, request: Request) -> bool:
        return request.op in ENDED_WITH_CALLER

    async def answer(self, bucket: int, request: Request) -> Answer:
        try:
            keeper = self.keeper
            if keeper is None or not threading.main_thread().is_alive():
                raise BucketClosed("the keeper is about to start or to end")
            if keeper.failure is not None:
                self._on_failure()
                raise BucketClosed(f"the keeper has failed: {keeper.failure}")
            if request.op not in CALLS:
                raise wire.unknown_request(request.op)
            return Reply(await answer(keeper, request.op, request.args))
        except Exception as exc:
            return wire.error_reply(exc)


class LocalKeeper:
    """A group that this process keeps, on the event loop of the sockets."""

    def __init__(self, folder: Path, config: TopicConfig, group: str) -> None:
        self.folder, self.config, self.group = folder, config, group
        self._server = GroupServer(_Place(folder, config), self._retire)
        self._retiring: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kept: KeptGroup | None = None

    @property
    def keeper(self) -> Keeper:
        assert self._kept is not None
        return self._kept.keeper

    async def start(self) -> None:
        """Keep the group, or raise :class:`KeptElsewhere`."""
        path = await in_thread(self._server.start)
        try:
            note = {} if path is None else {"socket": path}
            keeper = await in_thread(self._open, note)
        except BaseException:
            await self._server.stop()
            raise
        self._loop = loop_thread.acquire()
        try:
            await loop_thread.run_elsewhere(self._begin(keeper), self._loop)
        except BaseException:
            await in_thread(keeper.close)
            await self.stop()
            raise
        self._server.keeper = keeper

    def _open(self, note: dict[str, Any]) -> Keeper:
        check_same_topic(self.folder, self.config)  # else the keeper would create its folder again
        keeper = Keeper(self.folder, self.group, filesystem.current(), **note)
        try:
            check_same_topic(self.folder, self.config)  # from now on nobody can delete it
        except BaseException:
            keeper.close()
            raise
        return keeper

    async def _begin(self, keeper: Keeper) -> None:
        self._kept = KeptGroup(
            keeper,
            SharedReaderTopic(self.folder, self.config),
            lambda: open_dead_letters(self.folder, self.config),
            has_log=has_log(self.config),
        )
        await self._kept.start()

    def _retire(self) -> None:
        """End a keeper whose journal has failed, so that a member can become the next one; on the
        event loop of the sockets. Readers of this process may make no call for long."""
        if self._retiring is None:
            self._retiring = asyncio.create_task(_give_up(self))

    async def stop(self) -> None:
        """Give the group up."""
        self._server.keeper = None
        if self._loop is not None:
            if self._kept is not None:
                await loop_thread.run_elsewhere(self._kept.stop(), self._loop)
            loop_thread.release()
        await self._server.stop()


async def open_dead_letters(folder: Path, config: TopicConfig) -> Topic:
    """Open the dead letters of a topic for writing; create them with every put synced."""
    wanted = await dead_letters.letters_spec(folder, config)
    handle = await open_for_writing(wanted, str(folder.parent), None, TopicServer)
    return handle if handle.topic.listener is None else SharedTopic(handle)


async def read_dead_letters(folder: Path, name: str) -> Topic:
    """Open the dead letters of a topic for reading."""
    wanted, cls = topic_spec(name + dead_letters.SUFFIX)
    topic = await find_topic(wanted, cls, str(folder.parent))
    await topic.close()
    return SharedReaderTopic(folder_of(topic), topic.config)


class _Kept:
    """The groups that this process keeps, with the number of their users."""

    def __init__(self) -> None:
        self.groups: dict[tuple[Path, str], LocalKeeper] = {}
        self.users: dict[tuple[Path, str], int] = {}
        self.guard = threading.Lock()
        self.opening: set[tuple[Path, str]] = set()


_kept = _Kept()


def _reset_after_fork() -> None:
    """A forked process keeps no group."""
    global _kept
    _kept = _Kept()


os.register_at_fork(after_in_child=_reset_after_fork)


async def _give_up(local: LocalKeeper) -> None:
    """Stop a keeper of this process, unless somebody else does."""
    key = local.folder, local.group
    with _kept.guard:
        if _kept.groups.get(key) is not local:
            return
        del _kept.groups[key]
    await local.stop()


class SharedGroup:
    """The way to a group's keeper, in this process or another one."""

    def __init__(self, folder: Path, config: TopicConfig, group: str) -> None:
        self._folder, self._config, self._group = folder.resolve(), config, group
        self._key = self._folder, group
        self._process = os.getpid()
        self._connections = Connections()
        self._note: dict[str, Any] | None = None
        """The note of the process that kept the group at the last call."""
        self._closed = False
        with _kept.guard:
            _kept.users[self._key] = _kept.users.get(self._key, 0) + 1

    @property
    def key(self) -> Hashable:
        return self._key

    async def call(self, op: str, args: dict[str, Any]) -> Any:
        patience, began = Patience(), time.monotonic()
        while True:
            if self._closed or os.getpid() != self._process:
                raise BucketClosed(f"the reader of work group {self._group!r} is closed")
            failure = "its keeper is about to start or to end"
            here = _kept.groups.get(self._key)
            try:
                if here is not None:
                    if here.keeper.failure is None:
                        return await answer(here.keeper, op, args)
                    await self._replace(here)
                elif self._note is not None or await self._find():
                    try:
                        return await self._ask(op, args)
                    except BucketClosed:  # its process lives, and the keeper starts or ends
                        if time.monotonic() - began < _LONGEST_START_SECONDS:
                            patience.renew()
                        raise
                else:
                    continue
            except (KeeperEnded, Unreachable, BucketClosed) as exc:
                failure = str(exc)
                self._note = None
            patience.allow_retry()
            if patience.exhausted:
                raise StorageError(
                    f"the keeper of work group {self._group!r} of {self._folder} does not answer: "
                    f"{failure}; check whether its process is stopped or overloaded"
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _find(self) -> bool:
        """Find the keeper: True if another process is, False once this one may be."""
        note = await in_thread(owner_of, journal_folder(self._folder, self._group))
        if note is not None:
            if note.get("pid") == os.getpid() or not note.get("pid") or note.get("clean"):
                raise BucketClosed("it is about to start or to end")
            if "socket" not in note:
                raise InvalidArgument(
                    f"work group {self._group!r} is kept by {described(note)}, which takes no "
                    "connections of other processes: read through its cluster"
                )
            self._note = note
            return True
        with _kept.guard:
            if self._key in _kept.opening or self._key in _kept.groups:
                raise BucketClosed("it is about to start")
            _kept.opening.add(self._key)
        try:
            keeper = LocalKeeper(self._folder, self._config, self._group)
            await asyncio.shield(self._start(keeper))
        except KeptElsewhere:
            raise BucketClosed("another process was faster") from None
        return False

    async def _start(self, keeper: LocalKeeper) -> None:
        unused = False
        try:
            await keeper.start()
            with _kept.guard:
                unused = self._key not in _kept.users  # all readers were closed meanwhile
                if not unused:
                    _kept.groups[self._key] = keeper
        finally:
            with _kept.guard:
                _kept.opening.discard(self._key)
        if unused:
            await keeper.stop()

    async def _ask(self, op: str, args: dict[str, Any]) -> Any:
        assert self._note is not None
        try:
            connection = await self._connections.to(self._note["socket"])
        except WrongUser as exc:
            raise InvalidArgument(str(exc)) from exc
        return (await connection.ask(frames.TOPIC, Request(op, args))).value

    async def _replace(self, here: LocalKeeper) -> None:
        """End a keeper whose journal has failed; the next call replays what is durable."""
        await asyncio.shield(_give_up(here))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._connections.close()
        if os.getpid() != self._process:
            return
        with _kept.guard:
            _kept.users[self._key] -= 1
            last = _kept.users[self._key] == 0
            here = None
            if last:
                del _kept.users[self._key]
                here = _kept.groups.pop(self._key, None)
        if here is not None:
            await asyncio.shield(here.stop())


async def open_shared_work_reader(
    wanted: TopicSpec,
    cls: type | None,
    storage_path: Any,
    options: WorkOptions,
    wait_for_topic: bool | float,
) -> WorkReader:
    """Return a member of a work group on a folder."""
    options.check()

    async def find() -> Topic:
        return await find_topic(wanted, cls, storage_path)

    found = await when_found(find, deadline_of(wait_for_topic), _WAIT_STEP_SECONDS)
    try:
        options.check_topic(found)
        folder = folder_of(found)
        config = found.config
        check_backend(config)
        await in_thread(check_mode, folder, options.group)
    finally:
        await found.close()
    topic = SharedReaderTopic(folder, config)
    client = SharedGroup(folder, config, options.group)
    try:
        return await WorkReader.open(
            topic, client, options, lambda: read_dead_letters(folder, config.topic)
        )
    except BaseException:
        try:
            await client.close()
        finally:
            await topic.close()
        raise
