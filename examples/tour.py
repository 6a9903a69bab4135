"""A tour of what the backends can do: ``python examples/tour.py``.

Everything is written to a temporary folder, which is removed at the end. Each part checks its
claims; the tour fails if one does not hold.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pyarrow as pa

from persisting import metrics
from persisting.queue import (
    LanceBackend,
    PersistingBackend,
    SchemaError,
    read_queue,
    write_queue,
)

HERE = Path(__file__).parent
DURABLE = {"enable_wal": True, "wal_sync_interval": 0.0}


def say(text: str = "", *values: object) -> None:
    print(f"   {text}", *values, flush=True)


def check(claim: bool, what: str) -> None:
    if not claim:
        sys.exit(f"   FAILED: {what}")
    say(f"✓ {what}")


def speed(count: int, started: float) -> str:
    return f"{count / (time.perf_counter() - started):>10,.0f} records/s"


def orders(count: int) -> list[dict[str, object]]:
    return [{"id": f"order-{n}", "amount": n % 100, "paid": n % 3 == 0} for n in range(count)]


async def durable_puts(folder: Path) -> None:
    """A put returns when its record survives power loss"""
    async with PersistingBackend(0, str(folder / "bucket_0"), **DURABLE) as backend:
        single, together, batches = orders(500), orders(5000), [orders(1000)] * 20
        await backend.put(single[0])

        started = time.perf_counter()
        for order in single[1:]:
            await backend.put(order)
        say("one by one:   ", speed(len(single), started))

        started = time.perf_counter()
        await asyncio.gather(*(backend.put(order) for order in together))
        say("concurrently: ", speed(len(together), started), "(they share syncs)")

        started = time.perf_counter()
        for batch in batches:
            await backend.put_batch(batch)
        say("1,000 a batch:", speed(20_000, started))

        await backend.flush()
        stats = await backend.stats()
        check(stats["persisted_count"] == 25_500, "after flush() all 25,500 are in the table")
        check(stats["wal_size"] == 0, "and the log is empty")


async def killed(folder: Path) -> None:
    """A writer is killed with -9; nothing acknowledged is lost"""
    program = [sys.executable, str(HERE / "durable_producer.py"), str(folder)]
    for round_ in range(1, 4):
        acknowledged = _kill_in_the_middle(program, after=500 * round_)
        say(f"round {round_}: killed after acknowledging {acknowledged + 1} records")
    started = time.perf_counter()
    async with PersistingBackend(0, str(folder / "bucket_0"), **DURABLE) as backend:
        say(f"opened and recovered in {(time.perf_counter() - started) * 1000:.0f} ms")
        numbers = [record["number"] for record in await backend.get()]
        check(numbers == list(range(len(numbers))), f"{len(numbers)} records, each once, in order")
        check(len(numbers) > acknowledged, "every acknowledged record is among them")


def _kill_in_the_middle(program: list[str], after: int) -> int:
    """Run the producer, kill it after a number, and return the last acknowledged number."""
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        last = -1
        for line in child.stdout:
            if line.endswith("\n"):
                last = int(line)
            if last >= after:
                child.kill()
    return last


async def evolution(folder: Path) -> None:
    """Records may have new fields and wider types"""
    async with PersistingBackend(
        0, str(folder / "bucket_0"), **DURABLE, schema_defaults={"age": 0}
    ) as backend:
        for record in (
            {"id": "1", "name": "Ada", "score": 1},
            {"id": "2", "name": "Bob", "score": 2.5, "age": 30},
            {"id": "3", "address": {"city": "Ghent"}},
        ):
            say("put ", record)
            await backend.put(record)
            await backend.flush()
        for record in await backend.get():
            say("read", record)
        try:
            await backend.put({"id": 4})
        except SchemaError as error:
            say("refused:", error)
        check(backend.total_count() == 3, "a record that contradicts the schema is refused by put")


async def compression(folder: Path) -> None:
    """The same 20,000 log lines with each codec"""
    lines = [
        {"id": n, "line": f'{{"user": {n * 7919 % 5000}, "path": "/items/{n % 97}"}}'}
        for n in range(20_000)
    ]
    say(f"{'':8} {'log':>10} {'table':>10}")
    sizes = {}
    for codec in (None, "snappy", "lz4", "zstd"):
        path = folder / str(codec) / "bucket_0"
        backend = PersistingBackend(
            0,
            str(path),
            **DURABLE,
            compression=codec,
            flush_threshold=1 << 40,
            flush_interval=None,
        )
        async with backend:
            for start in range(0, len(lines), 1000):
                await backend.put_batch(lines[start : start + 1000])
            log = (await backend.stats())["wal_size"]
        table = sum(file.stat().st_size for file in (path / "data.lance" / "data").iterdir())
        sizes[codec] = (log, table)
        say(f"{codec or 'none':8} {log / 1000:>7,.0f} kB {table / 1000:>7,.0f} kB")
    check(sizes["zstd"] < sizes["lz4"] < sizes[None], "zstd < lz4 < none in the log")


async def arrow(folder: Path) -> None:
    """Arrow tables go in and out without a Python object per value"""
    rows = 500_000
    table = pa.table({"id": range(rows), "score": [n / 7 for n in range(rows)]})
    async with LanceBackend(0, str(folder / "bucket_0")) as backend:
        started = time.perf_counter()
        await backend.put_arrow(table)
        await backend.flush()
        say("in, durable:", speed(rows, started))
        started = time.perf_counter()
        read = await backend.get_arrow()
        say("out:        ", speed(rows, started))
        check(read.equals(table), "the table that comes out equals the one that went in")


async def stream(folder: Path) -> None:
    """A consumer waits for records without polling"""
    async with PersistingBackend(0, str(folder / "bucket_0"), **DURABLE) as backend:
        delays: list[float] = []

        async def consume() -> None:
            async for record in backend.get_stream(limit=100, block=True):
                delays.append(time.perf_counter() - record["sent"])

        consumer = asyncio.create_task(consume())
        for _ in range(100):
            await backend.put({"sent": time.perf_counter()})
            await asyncio.sleep(0.002)
        await consumer
        say(f"from put to consumer: {sorted(delays)[50] * 1000:.2f} ms (median), durable")
        check(len(delays) == 100, "all 100 records arrived, and the stream ended at its limit")


async def scrape(folder: Path) -> None:
    """Prometheus metrics, served with one line"""
    server = metrics.serve(port=0)
    async with PersistingBackend(
        0, str(folder / "bucket_0"), **DURABLE, enable_metrics=True
    ) as backend:
        await backend.put_batch(orders(250))
        await backend.flush()
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        say("scraped from", address)
        page = await asyncio.to_thread(lambda: urlopen(address).read().decode())
    for name in ("records_total", "buffer_size", "flush_duration_seconds_count", "wal_size_bytes"):
        say(next(line for line in page.splitlines() if line.startswith(f"persisting_{name}{{")))
    server.shutdown()
    server.server_close()
    check(
        "persisting_records_total" in page and "} 250.0" in page,
        "the counter matches the number of records",
    )


async def group(folder: Path) -> None:
    """Two consumers share a topic's buckets; one leaves, the other takes over"""
    place = {"topic": "orders", "storage_path": str(folder)}
    async with await write_queue(**place, backend="persisting", backend_options=DURABLE) as writer:
        await writer.put(orders(1000))
        first = await read_queue(**place, group="billing")
        second = await read_queue(**place, group="billing")
        seen: set[str] = set()
        while len(seen) < 1000 or not (first.buckets and second.buckets):
            for reader in (first, second):
                seen |= {order["id"] for order in await reader.get(100)}
            await asyncio.sleep(0.02)
        say(f"first reads buckets {first.buckets}, second {second.buckets}")
        check(len(seen) == 1000, "every record went to one of them")
        await first.commit()
        await first.close()
        await writer.put([{**order, "id": f"late-{order['id']}"} for order in orders(200)])
        while len(seen) < 1200:
            seen |= {order["id"] for order in await second.get(100, wait=True, timeout=5)}
        check(
            second.buckets == [0, 1, 2, 3], "later records go to the second, which owns all buckets"
        )
        await second.commit()
        await second.close()


async def search(folder: Path) -> None:
    """Vector and text search find records as soon as they are put"""
    rows, size = 20_000, 64
    vectors = np.random.default_rng(1).normal(size=(rows + 1, size)).astype("float32")
    place = {"topic": "pages", "storage_path": str(folder)}
    async with await write_queue(**place, backend="persisting") as writer:
        packed = pa.FixedSizeListArray.from_arrays(pa.array(vectors[:-1].ravel()), size)
        texts = [f"page {n} about {'cats' if n % 1000 == 0 else 'dogs'}" for n in range(rows)]
        table = pa.table({"id": map(str, range(rows)), "text": texts, "embedding": packed})
        await writer.put_arrow(table)
        await writer.create_index("embedding")
        await writer.create_index("text")
        started = time.perf_counter()
        hits = await writer.search(vector=vectors[7], k=10, columns=["id"])
        say(f"top 10 of {rows:,} in {(time.perf_counter() - started) * 1000:.0f} ms")
        nearest = np.argsort(((vectors[:-1] - vectors[7]) ** 2).sum(axis=1))[:10]
        check([int(hit["id"]) for hit in hits] == nearest.tolist(), "they are exactly the nearest")
        await writer.put({"id": "new", "text": "cats!", "embedding": vectors[-1]})
        (hit,) = await writer.search(vector=vectors[-1], k=1, columns=["id"])
        check(hit["id"] == "new", "a record just put is found")
        found = await writer.search(text="cats", where="id <> '0'", k=100)
        check(len(found) == 20, "text search with a condition finds the other 20 of 20,001")


async def snapshot(folder: Path) -> None:
    """A tag keeps a training set while the topic changes"""
    place = {"topic": "samples", "storage_path": str(folder)}
    async with (
        await write_queue(**place, backend="persisting", backend_options=DURABLE) as writer,
        await read_queue(**place) as reader,
    ):
        await writer.put(orders(1000))
        await writer.tag("train-1")
        before = await reader.get_arrow(version="train-1")
        for _ in range(5):
            await writer.put(orders(1000))
            await writer.flush()
        dropped = (await writer.retain(rows=500))["dropped"]
        say(f"5,000 more records arrived, and the oldest {dropped:,} were dropped")
        after = await reader.get_arrow(version="train-1")
        check(after.equals(before) and after.num_rows == 1000, "the tag still has its 1,000 rows")
        await writer.restore("train-1")
        check(
            (await reader.get_arrow(offset=0)).equals(before), "and the topic can be restored to it"
        )
        check((await writer.verify())["ok"], "verify() finds no damaged file")


async def cluster(folder: Path) -> None:
    """A node of a Pulsing cluster is killed with -9; the others recover its buckets"""
    import pulsing as pul

    nodes: dict[str, subprocess.Popen[str]] = {}
    seeds: list[str] = []
    try:
        for _ in range(2):
            node = _start_node(folder, seeds)
            _, address, _, name, *_ = node.stdout.readline().split()  # type: ignore[union-attr]
            nodes[name], seeds = node, [address]
        system = await pul.actor_system("127.0.0.1:0", seeds=seeds)
        await asyncio.sleep(2)
        writer = await write_queue(
            system,
            "orders",
            storage_path=str(folder),
            backend="persisting",
            backend_options=DURABLE,
        )
        await writer.put(orders(10))
        started = time.perf_counter()
        await writer.put(orders(20_000))
        say("one list to two processes:", speed(20_000, started))
        victim = (await writer.stats())["buckets"][0]["node"]
        nodes[victim].kill()
        started = time.perf_counter()
        await writer.put(orders(2_000))
        say(f"2,000 more were accepted {time.perf_counter() - started:.1f} s after the kill")
        reader = await read_queue(system, "orders")
        count = 0
        async for _ in reader.get_stream():
            count += 1
        check(count == 22_010, "all 22,010 acknowledged records are stored exactly once")
        await reader.close()
        await writer.close()
        await system.shutdown()
    finally:
        for node in nodes.values():
            node.terminate()
            node.communicate()


def _start_node(folder: Path, seeds: list[str]) -> subprocess.Popen[str]:
    """Start ``persisting serve``."""
    joining = [word for seed in seeds for word in ("--seed", seed)]
    program = [sys.executable, "-m", "persisting.cli", "serve", "--storage", str(folder), *joining]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True)


PARTS: tuple[Callable[[Path], Awaitable[None]], ...] = (
    durable_puts,
    killed,
    evolution,
    compression,
    arrow,
    stream,
    scrape,
    group,
    search,
    snapshot,
    cluster,
)


def main() -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="persisting-tour-") as folder:
        for number, part in enumerate(PARTS, 1):
            print(f"\n{number}. {part.__doc__}")
            asyncio.run(part(Path(folder) / part.__name__))
    print(f"\nEvery claim held, in {time.perf_counter() - started:.0f} s.")
    print("Next: README.md, docs/ (make docs), examples/, make bench.")


if __name__ == "__main__":
    main()
