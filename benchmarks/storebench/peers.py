"""SlateDB, LanceDB and Delta Lake: durable puts of the same records through the same proxy.

Each peer stores single records and lists as its documentation says. A call counts when it has
returned, and each call of these returns when its records are in the object store.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

Row = dict[str, Any]


class StorePeer(Protocol):
    """An open database in an object store."""

    name: str

    async def open(self, address: str, options: dict[str, str]) -> None: ...

    async def put(self, rows: list[Row]) -> None:
        """Store rows; return when they are durable."""

    async def close(self) -> None: ...


class SlateDB:
    """A key-value store whose writers share a log object every ``flush_interval``."""

    name = "SlateDB"

    def __init__(self, interval: str | None = None) -> None:
        """``interval`` replaces its default of 100 ms."""
        self._interval = interval
        if interval is not None:
            self.name = f"SlateDB, flush_interval {interval}"
        self._next = 0

    async def open(self, address: str, options: dict[str, str]) -> None:
        from slatedb.uniffi import DbBuilder, ObjectStore, Settings

        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        named = {"CLOUD_PROVIDER": "aws", "AWS_BUCKET": bucket, "AWS_ALLOW_HTTP": "true"}
        for key, value in options.items():
            if key.startswith("aws_"):
                named[key.upper()] = value
        with tempfile.NamedTemporaryFile("w", suffix=".env") as file:
            file.write("".join(f"{key}={value}\n" for key, value in named.items()))
            file.flush()
            builder = DbBuilder(prefix, ObjectStore.from_env(file.name))
        if self._interval is not None:
            settings = Settings.default()
            settings.set("flush_interval", f'"{self._interval}"')
            builder.with_settings(settings)
        self._db = await builder.build()

    async def put(self, rows: list[Row]) -> None:
        from slatedb.uniffi import WriteBatch

        if len(rows) == 1:
            handle = await self._db.put(self._key(), rows[0]["text"].encode())
        else:
            batch = WriteBatch()
            for row in rows:
                batch.put(self._key(), row["text"].encode())
            handle = await self._db.write(batch)
        await handle.await_durable()

    def _key(self) -> bytes:
        self._next += 1
        return b"%016d" % self._next

    async def close(self) -> None:
        await self._db.shutdown()


class LanceDB:
    """Each add is a commit of a table, one after the other: of many at once, some fail."""

    name = "LanceDB add"

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def open(self, address: str, options: dict[str, str]) -> None:
        import lancedb

        database = await lancedb.connect_async(address, storage_options=options)
        self._table = await database.create_table("records", [{"id": 0, "text": ""}])

    async def put(self, rows: list[Row]) -> None:
        async with self._turn:
            await self._table.add(rows)

    async def close(self) -> None:
        self._table.close()


class Delta:
    """Each append is a commit of a table, one after the other: of many at once, some fail."""

    name = "Delta append"

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def open(self, address: str, options: dict[str, str]) -> None:
        self._address = f"{address}/delta"
        self._options = {
            **{key.upper(): value for key, value in options.items()},
            "AWS_CONDITIONAL_PUT": "etag",
        }
        self._threads = ThreadPoolExecutor(1)
        await self.put([{"id": 0, "text": ""}])

    async def put(self, rows: list[Row]) -> None:
        async with self._turn:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._append, rows)

    def _append(self, rows: list[Row]) -> None:
        import pyarrow as pa
        from deltalake import write_deltalake

        write_deltalake(
            self._address, pa.Table.from_pylist(rows), mode="append", storage_options=self._options
        )

    async def close(self) -> None:
        self._threads.shutdown()


PEERS: dict[str, Callable[[], StorePeer]] = {
    "slatedb": SlateDB,
    "slatedb-5ms": lambda: SlateDB("5ms"),
    "lancedb": LanceDB,
    "deltalake": Delta,
}


def missing(peer: str) -> str | None:
    """Return why a peer cannot be measured, None if it can."""
    package = peer.partition("-")[0]
    try:
        __import__(package)
    except ImportError as exc:
        return f"{peer} is not measured: {exc}; pip install {package}"
    return None


Measure = Callable[[Callable[[list[Row]], Awaitable[None]]], Awaitable[dict[str, float]]]


async def measure_peer(
    peer: str,
    address: str,
    options: dict[str, str],
    measures: dict[str, Measure],
    say: Callable[[str, dict[str, float]], None],
) -> None:
    """Measure one peer; an error of it is printed and does not stop the others."""
    os.environ.setdefault("RUST_LOG", "off")
    made = PEERS[peer]()
    try:
        await made.open(address, options)
        try:
            for what, measure in measures.items():
                say(f"{made.name}, {what}", await measure(made.put))
        finally:
            await made.close()
    except Exception as exc:
        print(f"{made.name} failed: {type(exc).__name__}: {str(exc)[:300]}", flush=True)
