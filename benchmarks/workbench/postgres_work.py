"""PostgreSQL: a table of tasks, ``SELECT … FOR UPDATE SKIP LOCKED``, every commit synced."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peersbench import servers
from peersbench.async_store import AsyncStore
from peersbench.record_kinds import Kind, Packer, Record

from workbench.crowd import LEASE, SMALL, WORKERS, Crowd
from workbench.peer import WorkPeer, WorkStore

_USER = "postgres"
_TABLE = """
CREATE TABLE tasks (id bigserial PRIMARY KEY, payload bytea NOT NULL, lease_end timestamptz);
CREATE INDEX ON tasks (id) WHERE lease_end IS NULL;
"""
_FIRST = "FROM tasks WHERE lease_end IS NULL ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED"
_LOCK = f"SELECT id, payload {_FIRST}"
_LEASE = (
    f"UPDATE tasks SET lease_end = now() + interval '{LEASE:g} seconds' "
    f"WHERE id = (SELECT id {_FIRST}) RETURNING id, payload"
)
_FINISH = "DELETE FROM tasks WHERE id = $1"


class PostgresWork(AsyncStore, WorkStore):
    """A server on a Unix socket with the default settings, which sync every commit."""

    workers = "postgres_work"
    locks = False

    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__()
        self._packer = Packer(kind)
        user = _USER if os.geteuid() == 0 else None  # it refuses to run as root
        # The server's user must be able to reach its data, and the path of a socket is short.
        self._home = Path(tempfile.mkdtemp(prefix="postgres-"))
        data = folder / "data"
        data.mkdir(mode=0o700)
        if user is not None:
            for place in (self._home, data):
                shutil.chown(place, user, user)
            for place in (folder, folder.parent):  # made by the benchmark for itself
                place.chmod(0o711)
        _initialize(data, user)
        command = [_tool("postgres"), "-D", ".", "-k", str(self._home)]
        command += ["-c", "listen_addresses=", "-c", f"max_connections={WORKERS + 10}"]
        self._server = servers.Server(
            command, folder / "postgres.log", self._answers, user=user, folder=data
        )
        self.address = f"{self._home}{'?locks' if self.locks else ''}"
        self._connection = self.run(self._open())

    def _answers(self) -> None:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(f"{self._home}/.s.PGSQL.5432")

    async def _open(self) -> Any:
        import asyncpg

        while True:
            try:
                connection = await _connection(self._home)
                break
            except asyncpg.CannotConnectNowError:
                await asyncio.sleep(0.05)
        for setting in ("fsync", "synchronous_commit"):
            if await connection.fetchval(f"SHOW {setting}") != "on":
                raise SystemExit(f"PostgreSQL has {setting} off")
        await connection.execute(_TABLE)
        return connection

    async def put(self, row: Record) -> None:
        await self.put_batch([row])

    async def put_batch(self, rows: list[Record]) -> None:
        packed = [(self._packer.pack(row),) for row in rows]
        await self._connection.copy_records_to_table("tasks", records=packed, columns=["payload"])

    def prepare_read(self) -> None:
        self.run(self._connection.execute("VACUUM ANALYZE tasks"))

    def unfinished(self) -> int:
        return int(self.run(self._connection.fetchval("SELECT count(*) FROM tasks")))

    def close(self) -> None:
        self.run(self._connection.close())
        self._server.stop(signal.SIGINT)
        shutil.rmtree(self._home, ignore_errors=True)
        super().close()


class LockedPostgresWork(PostgresWork):
    """The claim is the lock of an open transaction; only the acknowledgement is a commit."""

    locks = True


class LeasingWorkers:
    """A claim is a commit that sets the end of a lease; an acknowledgement deletes the row."""

    def __init__(self, connections: list[Any]) -> None:
        self._connections = connections
        self._packer = Packer(SMALL)

    async def work(self, crowd: Crowd) -> None:
        await asyncio.gather(*(self._worker(own, crowd) for own in self._connections))

    async def _worker(self, connection: Any, crowd: Crowd) -> None:
        while crowd.more and await self._one(connection, crowd):
            crowd.finish()

    async def _one(self, connection: Any, crowd: Crowd) -> bool:
        row = await connection.fetchrow(_LEASE)
        if row is None:
            return False
        crowd.claimed.append(self._packer.unpack(row["payload"]))
        await connection.execute(_FINISH, row["id"])
        return True

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


class LockingWorkers(LeasingWorkers):
    """One transaction claims, works and deletes."""

    async def _one(self, connection: Any, crowd: Crowd) -> bool:
        async with connection.transaction():
            row = await connection.fetchrow(_LOCK)
            if row is None:
                return False
            crowd.claimed.append(self._packer.unpack(row["payload"]))
            await connection.execute(_FINISH, row["id"])
        return True


async def connect(address: str, workers: int) -> LeasingWorkers:
    home, _, locks = address.partition("?")
    connections = await asyncio.gather(*(_connection(Path(home)) for _ in range(workers)))
    return (LockingWorkers if locks else LeasingWorkers)(list(connections))


async def _connection(home: Path) -> Any:
    import asyncpg

    return await asyncpg.connect(host=str(home), user=_USER, database="postgres")


def _initialize(data: Path, user: str | None) -> None:
    command = [_tool("initdb"), "-D", ".", "-U", _USER, "-A", "trust", "--no-locale"]
    made = subprocess.run(
        command, capture_output=True, text=True, cwd=data, user=user, group=user, check=False
    )
    if made.returncode != 0:
        raise SystemExit(f"initdb failed: {made.stderr}")


def _find(name: str) -> str | None:
    return servers.find(name, *sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}")))


def _tool(name: str) -> str:
    found = _find(name)
    assert found is not None
    return found


def _missing() -> str | None:
    if find_spec("asyncpg") is None:
        return "asyncpg, the client, is not installed"
    return None if _find("initdb") and _find("postgres") else "postgresql is not installed"


def _version() -> str:
    return servers.version(_find("postgres"))


LEASES = WorkPeer(
    "PostgreSQL, leases", "both synced: two commits", PostgresWork, _missing, _version, 3.0
)
LOCKS = WorkPeer(
    "PostgreSQL, row locks",
    "the acknowledgement: one commit",
    LockedPostgresWork,
    _missing,
    _version,
    3.0,
)
PEERS = (LEASES, LOCKS)
