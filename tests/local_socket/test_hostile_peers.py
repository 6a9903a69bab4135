"""Invalid bytes, foreign processes and files: the owner keeps serving, and loses nothing."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from support.children import python, run, wait_for_line
from support.topic_places import WAL, ids, numbered

from persisting.cluster import wire
from persisting.local_socket import addresses, frames, peers
from persisting.lock import owner_of
from persisting.queue import QueueWriter, read_queue, write_queue
from persisting.topic.spec import bucket_folder

LOGGED: dict[str, Any] = {"backend": "persisting", "backend_options": WAL, "num_buckets": 2}


@pytest.fixture
async def writer(tmp_path: Path) -> AsyncIterator[QueueWriter]:
    """A writer in this process, which owns both buckets and listens."""
    async with await write_queue(topic="t", storage_path=str(tmp_path), **LOGGED) as opened:
        await opened.put(numbered(20))
        yield opened


def socket_of(folder: Path) -> Path:
    note = owner_of(bucket_folder(folder / "t", 0))
    assert note is not None
    return Path(note["socket"])


def connected(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(60)
    peer.connect(os.fspath(path))
    return peer


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def read_to_end(peer: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionError):
        while part := peer.recv(65536):
            data += part
    return data


async def still_works(writer: QueueWriter, folder: Path) -> None:
    await writer.put(numbered(20, 100))
    peer = connected(socket_of(folder))
    with peer:
        call = frames.CallFrame(1, 0, wire.Request("here"))
        peer.sendall(frames.greeting() + frames.encoded(call))
        greeting = frames.greeting()
        data = b""
        while len(data) <= len(greeting):
            data += await asyncio.to_thread(peer.recv, 65536)
        assert data.startswith(greeting)
        (size,) = struct.unpack_from("<I", data, len(greeting))
        answer = msgspec.msgpack.decode(data[len(greeting) + 4 :][:size])
        assert answer[1][0] == "here"


async def test_socket_is_private(writer: QueueWriter, tmp_path: Path) -> None:
    path = socket_of(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent == tmp_path / "t" / addresses.FOLDER


async def test_socket_is_removed_with_the_last_handle(tmp_path: Path) -> None:
    async with await write_queue(topic="t", storage_path=str(tmp_path), **LOGGED) as writer:
        await writer.put(numbered(20))
        path = socket_of(tmp_path)
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("runtime_is_short", [True, False])
async def test_socket_of_a_long_path_is_in_a_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime_is_short: bool
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        runtime = Path(short) / ("run" if runtime_is_short else "long" * 30)
        runtime.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        monkeypatch.setattr(tempfile, "tempdir", short)
        folder = tmp_path / ("long" * 30)
        async with await write_queue(topic="t", storage_path=str(folder), **LOGGED) as writer:
            await writer.put(numbered(20))
            path = socket_of(folder)
            in_temporary = Path(short) / f"persisting-{os.geteuid()}"
            assert path.parent == (runtime / "persisting" if runtime_is_short else in_temporary)
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            await still_works(writer, folder)


async def test_topic_without_a_place_for_a_socket_works_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(addresses, "PATH_LIMIT", 1)
    async with await write_queue(topic="t", storage_path=str(tmp_path), **LOGGED) as writer:
        await writer.put(numbered(20))
        note = owner_of(bucket_folder(tmp_path / "t", 0))
        assert note is not None
        assert "socket" not in note
    assert "cannot listen for other processes" in caplog.text


async def test_stale_sockets_of_dead_processes_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "t" / addresses.FOLDER
    folder.mkdir(parents=True)
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(os.fspath(folder / "1-dead.sock"))
    stale.close()
    async with await write_queue(topic="t", storage_path=str(tmp_path), **LOGGED) as writer:
        await writer.put(numbered(20))
        assert [p.name for p in folder.iterdir()] == [socket_of(tmp_path).name]


async def test_folder_that_another_user_prepared_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "t" / addresses.FOLDER
    folder.parent.mkdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="not a folder of this user"):
        addresses._listen_in(folder, "name")


async def test_process_of_another_user_is_refused(
    writer: QueueWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.Peer, "is_same_user", property(lambda peer: False))
    with connected(socket_of(tmp_path)) as peer:
        assert await asyncio.to_thread(read_to_end, peer) == b""
    monkeypatch.undo()
    await still_works(writer, tmp_path)


def open_to_all(path: Path) -> Path:
    """Let every user reach a file."""
    for place in (path, *path.parents):
        if place == Path("/tmp"):
            break
        place.chmod(0o777)
    return path


CHILD_OF_ANOTHER_USER = """
import asyncio, os, sys
from persisting.errors import StorageError
from persisting.local_socket.connection import OwnerConnection
async def main():
    os.setgid(65534); os.setuid(65534)
    try:
        await OwnerConnection.open(sys.argv[1])
        print("connected")
    except StorageError as exc:
        print(type(exc).__name__, exc)
asyncio.run(main())
"""


OPENS_AS_ANOTHER_USER = """
import asyncio, os, sys
from persisting.queue import read_queue, write_queue  # the packages may be root's alone
from persisting.local_socket import open_shared
from persisting.topic import deletion, inspect
from pathlib import Path
os.setgid(65534); os.setuid(65534)
place = {"topic": "t", "storage_path": sys.argv[1]}
for call in (
    lambda: asyncio.run(read_queue(**place)),
    lambda: asyncio.run(write_queue(**place)),
    lambda: deletion.check_deletable(Path(sys.argv[1]) / "t"),
    lambda: print(inspect.topics_in(sys.argv[1])[0].problem),
):
    try:
        call()
    except Exception as exc:
        print(type(exc).__name__, exc)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_topic_of_another_user_is_refused_with_the_reason(
    writer: QueueWriter, tmp_path: Path
) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o755)
    said = (await asyncio.to_thread(run, OPENS_AS_ANOTHER_USER, tmp_path)).splitlines()
    assert len(said) == 4
    for line in said:
        assert "belongs to another user" in line
        assert str(tmp_path / "t") in line
    assert [line.split()[0] for line in said[:3]] == ["StorageError"] * 3
    await still_works(writer, tmp_path)


UNCHECKED_CHILD_OF_ANOTHER_USER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.connect(sys.argv[1])
print(os.getpid(), len(peer.recv(100)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_owner_closes_the_connection_of_another_user(
    writer: QueueWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process may not check who it talks to."""
    path = open_to_all(socket_of(tmp_path))
    pid, received = (await asyncio.to_thread(run, UNCHECKED_CHILD_OF_ANOTHER_USER, path)).split()
    assert received == "0"
    assert f"refused a connection of process {pid} of user 65534" in caplog.text
    await still_works(writer, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_real_process_of_another_user_gets_the_reason(
    writer: QueueWriter, tmp_path: Path
) -> None:
    path = open_to_all(socket_of(tmp_path))
    with python(CHILD_OF_ANOTHER_USER, path) as child:
        said = await asyncio.to_thread(wait_for_line, child)
    assert said.startswith("WrongUser")
    assert "one user" in said
    await still_works(writer, tmp_path)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b"persisting socket 0"),
        frames.greeting() + struct.pack("<I", frames.FRAME_LIMIT + 1),
        frames.greeting() + framed(b"\xc1"),
        frames.greeting() + framed(msgspec.msgpack.encode(["text", 1])),
        frames.greeting() + framed(msgspec.msgpack.encode([0, 0, ["here"]])),
        frames.greeting() + 2 * framed(msgspec.msgpack.encode([1, 0, ["stats"]])),
    ],
    ids=["http", "version", "size", "msgpack", "types", "zero", "twice"],
)
async def test_connection_that_breaks_the_protocol_is_closed(
    writer: QueueWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    with connected(socket_of(tmp_path)) as peer:
        peer.sendall(sent)
        await asyncio.to_thread(read_to_end, peer)
    assert "closed the connection of process" in caplog.text
    await still_works(writer, tmp_path)


@pytest.mark.parametrize(
    "request_",
    [
        wire.Request("nonsense"),
        wire.Request("put", {"mark": 5}, [b"\xc1"]),
        wire.Request("put", {"mark": ["w", 1]}, [b"no rows"]),
        wire.Request("put", {"mark": ["w", 1]}, [b"no arrow"], True),
        wire.Request("put", {}, [b""]),
        wire.Request("put", {"mark": ["w", 1]}, [b"\x91\x81\xa2id\xc7\x01\x63x"]),
        wire.Request("put", {"mark": ["w", 1], "columns": b"no schema"}, [b"no batch"]),
        wire.Request("put", {"mark": ["w", 1 << 63]}, [wire.pack_records([{"id": 1}])]),
        wire.Request("put", {"mark": ["", 1]}, [wire.pack_records([{"id": 1}])]),
        wire.Request("put_parts", {"mark": ["w", 1], "buckets": [[0, 9, False]]}, [b""]),
        wire.Request("get", {"offset": "x", "limit": []}),
        wire.Request("table", {"op": "__class__", "args": {}}),
        wire.Request("stats", {"self": 1}),
    ],
    ids=lambda request: request.op,
)
async def test_requests_that_make_no_sense_are_answered_with_an_error(
    writer: QueueWriter, tmp_path: Path, request_: wire.Request
) -> None:
    from persisting.errors import StorageError
    from persisting.local_socket.connection import BucketConnection, OwnerConnection

    owner = await OwnerConnection.open(str(socket_of(tmp_path)))
    connection = BucketConnection(owner, 0)
    try:
        with pytest.raises(StorageError):
            await anext(connection.stream(request_))
    finally:
        owner.close()
    await still_works(writer, tmp_path)
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        assert len(await reader.get(None)) == 40


async def test_damaged_arrow_data_is_refused(writer: QueueWriter, tmp_path: Path) -> None:
    """Offsets that point outside of their buffer would crash whoever reads them."""
    from persisting.errors import StorageError
    from persisting.local_socket.connection import BucketConnection, OwnerConnection

    sound = wire.pack_arrow(pa.table({"id": [1, 2], "text": ["seven c", "eleven char"]}))
    offsets = struct.pack("<3i", 0, 7, 18)
    assert sound.count(offsets) == 1
    data = sound.replace(offsets, struct.pack("<3i", 0, 1_000_000_000, 2_000_000_000))
    request = wire.Request("put", {"mark": ["w", 1]}, [data], True)
    owner = await OwnerConnection.open(str(socket_of(tmp_path)))
    try:
        with pytest.raises(StorageError, match="Arrow"):
            await BucketConnection(owner, 0).ask(request)
    finally:
        owner.close()
    await still_works(writer, tmp_path)


async def test_answers_wait_whole_for_a_peer_that_does_not_read(
    writer: QueueWriter, tmp_path: Path
) -> None:
    """More answers than a socket holds, by threads and by the event loop."""
    count = 3000

    def call(number: int) -> frames.CallFrame:
        if number % 10 == 0:
            return frames.CallFrame(number, 0, wire.Request("stats"))
        rows = wire.pack_records([{"id": 10_000 + number}])
        return frames.CallFrame(number, 0, wire.Request("put", {"mark": ["w", number]}, [rows]))

    def send() -> None:
        for number in range(1, count + 1):
            peer.sendall(frames.encoded(call(number)))

    with connected(socket_of(tmp_path)) as peer:
        peer.sendall(frames.greeting())
        sending = asyncio.create_task(asyncio.to_thread(send))
        await asyncio.wait([sending], timeout=1.0)
        buffer, decoder = frames.FrameBuffer(), frames.FrameDecoder(frames.AnswerFrame)
        answered: list[int] = []
        while len(answered) < count:
            size = await asyncio.to_thread(peer.recv_into, buffer.space())
            assert size
            decoded = [decoder.decode(data) for data in buffer.received(size)]
            answers = [answer for answer in decoded if answer is not None and answer.id]
            assert all(answer.reply is not None and not answer.reply.error for answer in answers)
            answered += [answer.id for answer in answers]
        await sending
    assert sorted(answered) == list(range(1, count + 1))
    puts = [10_000 + number for number in range(1, count + 1) if number % 10]
    async with await read_queue(topic="t", storage_path=str(tmp_path), bucket_id=0) as reader:
        assert [found for found in ids(await reader.get(None)) if found >= 10_000] == puts


@pytest.mark.parametrize("seed", range(3))
async def test_fuzzed_bytes_neither_crash_the_owner_nor_change_the_topic(
    writer: QueueWriter, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    path = socket_of(tmp_path)
    rows = wire.pack_records([{"id": 1}])
    sample = [
        bytes(frames.encoded(frames.CallFrame(n + 1, n % 3 - 1, request, n)))
        for n, request in enumerate(
            [
                wire.Request("here"),
                wire.Request("get", {"offset": 0, "limit": 5}),
                wire.Request("stream", {"offset": 0, "limit": None, "block": True, "epoch": None}),
                wire.Request("watch"),
                wire.Request("stage", {"upload": "u", "number": 0}, [rows]),
                wire.Request("table", {"op": "query", "args": {}}),
                wire.Request("put", {"mark": ["w", -1]}, [rows]),
                wire.Request("put_parts", {"mark": ["w"], "buckets": [[0, 1, False]]}, [rows]),
            ]
        )
    ]
    for _ in range(60):
        data = bytearray(b"".join(chance.sample(sample, 3)))
        for _ in range(chance.randrange(6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with connected(path) as peer, suppress(ConnectionError):
            peer.sendall(frames.greeting() + data[: chance.randrange(1, len(data) + 1)])
    await still_works(writer, tmp_path)
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        found = ids(await reader.get(None))
    assert sorted(found) == [*range(20), *range(100, 120)]
