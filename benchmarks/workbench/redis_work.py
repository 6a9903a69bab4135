"""Redis Streams: ``XREADGROUP`` and ``XACK``, an append-only file synced before each answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from peersbench import servers
from peersbench.record_kinds import Kind, Packer
from peersbench.redis_store import FIELD, STREAM, RedisStore, missing, program

from workbench.crowd import SMALL, Crowd
from workbench.peer import WorkPeer, WorkStore

_GROUP = "g"


class RedisWork(RedisStore, WorkStore):
    """A stream with a consumer group."""

    workers = "redis_work"

    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__(folder, kind)
        self.address = self.socket

    def prepare_read(self) -> None:
        self.client.xgroup_create(STREAM, _GROUP, id="0")

    def unfinished(self) -> int:
        (group,) = self.client.xinfo_groups(STREAM)
        return int(group["pending"]) + int(group["lag"])


class RedisWorkers:
    """Every worker is a consumer with a connection of its own."""

    def __init__(self, clients: list[Any]) -> None:
        self._clients = clients
        self._packer = Packer(SMALL)

    async def work(self, crowd: Crowd) -> None:
        await asyncio.gather(*(self._worker(client, crowd) for client in self._clients))

    async def _worker(self, client: Any, crowd: Crowd) -> None:
        name = f"worker-{id(client)}"
        while crowd.more:
            reply = await client.xreadgroup(_GROUP, name, {STREAM: ">"}, count=1)
            if not reply:
                return
            ((_, ((place, fields),)),) = reply.items() if isinstance(reply, dict) else reply
            crowd.claimed.append(self._packer.unpack(fields[FIELD]))
            if await client.xack(STREAM, _GROUP, place) != 1:
                raise SystemExit(f"Redis has not acknowledged {place!r}")
            crowd.finish()

    async def close(self) -> None:
        await asyncio.gather(*(client.aclose() for client in self._clients))


async def connect(address: str, workers: int) -> RedisWorkers:
    import redis.asyncio

    return RedisWorkers(
        [
            redis.asyncio.Redis(unix_socket_path=address, single_connection_client=True)
            for _ in range(workers)
        ]
    )


PEER = WorkPeer(
    "Redis Streams",
    "both synced: appendfsync always",
    RedisWork,
    missing,
    lambda: servers.version(program()),
    target=1.0,
)
