"""Work groups without a cluster: one process keeps the group, others on its machine call it.

The first process that opens a group keeps it: it holds the lock of the group's folder, or its lease
in an object store; a note names the socket. When it ends or dies, the next call of any member makes
its process the keeper.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from persisting.cluster import wire
from persisting.cluster.locator import Patience
from persisting.cluster.transport import Answer, Unreachable
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import in_thread
from persisting.errors import (
    BucketClosed,
    InvalidArgument,
    NoSuchTopic,
    StorageError,
)
from persisting.local_socket import frames, loop_thread
from persisting.local_socket.connection import Connections, WrongUser
from persisting.local_socket.server import TopicServer
from persisting.local_socket.shared_reader import SharedReaderTopic
from persisting.local_socket.shared_topic import as_shared
from persisting.lock import described
from persisting.store.object_store import ObjectStore
from persisting.topic.bucket_client import Topic
from persisting.topic.local import open_for_writing
from persisting.topic.open_local import deadline_of, find_topic, topic_spec, when_found
from persisting.topic.open_store import StoreReadTopic, find_in_store
from persisting.topic.spec import TopicConfig, TopicSpec
from persisting.work import dead_letters
from persisting.work.client import CALLS, ENDED_WITH_CALLER, answer
from persisting.work.group_place import (
    FolderPlace,
    GroupPlace,
    KeeperNote,
    StorePlace,
    place_of,
)
from persisting.work.group_storage import KeptElsewhere
from persisting.work.keeper import Keeper, KeeperEnded
from persisting.work.kept_group import KeptGroup
from persisting.work.open_group import check_backend, has_log
from persisting.work.reader import WorkOptions, WorkReader

_WAIT_STEP_SECONDS = 0.05
_STORE_STEP_SECONDS = 0.5
_LONGEST_START_SECONDS = 300.0
"""A keeper may take this long to replay its journal and to check the topic."""


class _Listening(NamedTuple):
    """What a server needs to know of a topic."""

    folder: Path | None
    config: TopicConfig


class GroupServer(TopicServer):
    """Listens for the members of one group in other processes."""

    def __init__(self, place: GroupPlace, on_failure: Callable[[], None]) -> None:
        """``on_failure`` is called when a member finds that the keeper has failed."""
        folder = place.folder if isinstance(place, FolderPlace) else None
        super().__init__(_Listening(folder, place.config))  # type: ignore[arg-type]
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

    def __init__(self, place: GroupPlace, group: str) -> None:
        self.place, self.group = place, group
        self._server = GroupServer(place, self._retire)
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
            keeper = await in_thread(self._open, path or "")
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

    def _open(self, path: str) -> Keeper:
        self.place.check_same_topic()  # else the keeper would create its place again
        keeper = Keeper(self.place.keep(self.group, socket=path))
        try:
            self.place.check_same_topic()  # from now on nobody can delete it
        except BaseException:
            keeper.close()
            raise
        return keeper

    async def _begin(self, keeper: Keeper) -> None:
        self._kept = KeptGroup(
            keeper,
            _reading(self.place),
            lambda: open_dead_letters(self.place),
            has_log=has_log(self.place.config),
        )
        await self._kept.start()

    def _retire(self) -> None:
        """End a keeper whose journal has failed, so that a member can become the next one; on the
        event loop of the sockets. Readers of this process may make no call for a long time."""
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


def _reading(place: GroupPlace) -> Topic:
    """Return a topic for reading."""
    if isinstance(place, StorePlace):
        return StoreReadTopic(place.store, place.config)
    assert isinstance(place, FolderPlace)
    return SharedReaderTopic(place.folder, place.config)


async def open_dead_letters(place: GroupPlace) -> Topic:
    """Open the dead letters of a topic for writing; create them with every put synced."""
    wanted = await dead_letters.letters_spec(place)
    if isinstance(place, StorePlace):
        store = place.letters_store()
        return as_shared(await open_for_writing(wanted, None, None, TopicServer, store))
    assert isinstance(place, FolderPlace)
    return as_shared(await open_for_writing(wanted, str(place.folder.parent), None, TopicServer))


async def read_dead_letters(place: GroupPlace) -> Topic:
    """Open the dead letters of a topic for reading."""
    if isinstance(place, StorePlace):
        config = await in_thread(place.load_letters)
        if config is None:
            name = place.config.topic + dead_letters.SUFFIX
            raise NoSuchTopic(f"there is no topic {name!r} at {place.store.address.parent}")
        return StoreReadTopic(place.letters_store(), config)
    assert isinstance(place, FolderPlace)
    wanted, cls = topic_spec(place.config.topic + dead_letters.SUFFIX)
    topic = await find_topic(wanted, cls, str(place.folder.parent))
    await topic.close()
    folder = await in_thread(Path(topic.folder).resolve)
    return SharedReaderTopic(folder, topic.config)


_Key: TypeAlias = "tuple[Hashable, str]"
"""The place of a topic, and a group."""


class _Kept:
    """The groups that this process keeps, with the number of their users."""

    def __init__(self) -> None:
        self.groups: dict[_Key, LocalKeeper] = {}
        self.users: dict[_Key, int] = {}
        self.guard = threading.Lock()
        self.opening: set[_Key] = set()


_kept = _Kept()


def _reset_after_fork() -> None:
    """A forked process keeps no group."""
    global _kept
    _kept = _Kept()


os.register_at_fork(after_in_child=_reset_after_fork)


async def _give_up(local: LocalKeeper) -> None:
    """Stop a keeper of this process, unless another caller does."""
    key = local.place.key, local.group
    with _kept.guard:
        if _kept.groups.get(key) is not local:
            return
        del _kept.groups[key]
    await local.stop()


class SharedGroup:
    """The way to a group's keeper, in this process or another one."""

    def __init__(self, place: GroupPlace, group: str) -> None:
        self._place, self._group = place, group
        self._key = place.key, group
        self._process = os.getpid()
        self._connections = Connections()
        self._note: KeeperNote | None = None
        """The process that kept the group at the last call."""
        self._finding = asyncio.Lock()
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
                elif self._note is not None or await self._find_alone():
                    try:
                        return await self._ask(op, args)
                    except BucketClosed:  # its process is alive, and the keeper starts or ends
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
                    f"the keeper of work group {self._group!r} of {self._place} does not answer: "
                    f"{failure}; check whether its process is stopped or overloaded"
                )
            await asyncio.sleep(self._place.pause_seconds)

    async def _find_alone(self) -> bool:
        """Find the keeper, for one of the calls that wait: True if it is in another process, False
        to look in this one."""
        async with self._finding:
            if self._note is not None:
                return True
            if self._key in _kept.groups:
                return False
            return await self._find()

    async def _find(self) -> bool:
        """Find the keeper: True if another process is, False once this one is."""
        if self._key in _kept.opening:
            raise BucketClosed("it is about to start")
        note = await in_thread(self._place.keeper_note, self._group)
        if note is not None:
            if note.is_here:
                raise BucketClosed("it is about to start or to end")
            if not note.socket:
                await self._wait_until_gone(note)
            self._note = note
            return True
        with _kept.guard:
            if self._key in _kept.opening or self._key in _kept.groups:
                raise BucketClosed("it is about to start")
            _kept.opening.add(self._key)
        try:
            keeper = LocalKeeper(self._place, self._group)
            await asyncio.shield(self._start(keeper))
        except KeptElsewhere:
            raise BucketClosed("another process was faster") from None
        return False

    async def _wait_until_gone(self, note: KeeperNote) -> None:
        """Raise :class:`BucketClosed` when a keeper that cannot be called counts as dead, and
        another error if it is alive."""
        now: KeeperNote | None = note
        while note.beat is not None and now is not None and now.beat == note.beat:
            await asyncio.sleep(self._place.pause_seconds)
            now = await in_thread(self._place.keeper_note, self._group)
        if now is None or now.socket:
            raise BucketClosed("its keeper has just ended")
        raise InvalidArgument(
            f"work group {self._group!r} of {self._place} is kept by {described(now.owner)}, which "
            "takes no connections of other processes: read through its cluster, or on its machine"
        )

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
            connection = await self._connections.to(self._note.socket)
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

    return await _open(find, options, wait_for_topic, _WAIT_STEP_SECONDS)


async def open_store_work_reader(
    wanted: TopicSpec, store: ObjectStore, options: WorkOptions, wait_for_topic: bool | float
) -> WorkReader:
    """Return a member of a work group in an object store."""
    options.check()

    async def find() -> Topic:
        return await find_in_store(wanted, store)

    return await _open(find, options, wait_for_topic, _STORE_STEP_SECONDS)


async def _open(
    find: Callable[[], Awaitable[Topic]],
    options: WorkOptions,
    wait_for_topic: bool | float,
    step: float,
) -> WorkReader:
    found = await when_found(find, deadline_of(wait_for_topic), step)
    try:
        options.check_topic(found)
        check_backend(found.config)
        place = place_of(found)
        await in_thread(place.check_mode, options.group)
    finally:
        await found.close()
    topic = _reading(place)
    client = SharedGroup(place, options.group)
    try:
        return await WorkReader.open(topic, client, options, lambda: read_dead_letters(place))
    except BaseException:
        try:
            await client.close()
        finally:
            await topic.close()
        raise
