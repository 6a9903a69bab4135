"""Names are added to Pulsing where it has none; its own names and queues keep working."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.children import run

from persisting.queue import LanceBackend, MemoryBackend, PersistingBackend

OURS = (
    "register_backend",
    "get_backend_class",
    "list_backends",
    "write_queue",
    "read_queue",
)

NAMES = """
import sys
first, second = sys.argv[1].split(",")
if first == "pulsing":
    import pulsing
    before = {name: getattr(pulsing.queue, name) for name in dir(pulsing.queue)}
    own = {name: value for name, value in vars(pulsing).items()}
    import persisting
    assert all(vars(pulsing)[name] is own[name] for name in own)
    assert all(getattr(pulsing.queue, name) == value for name, value in before.items()
               if name in ("write", "read"))
else:
    import persisting
    assert "pulsing" not in sys.modules, "importing persisting must not import pulsing"
import pulsing as pul
import pulsing.queue as module
from pulsing.queue import write_queue, read_queue, register_backend
assert type(pul.queue).__module__ == "pulsing", type(pul.queue)
assert type(pul.queue).write is type(pul.queue).__dict__["write"]
assert "write" not in vars(pul.queue) and "read" not in vars(pul.queue)
for name in ("register_backend", "get_backend_class", "list_backends", "write_queue", "read_queue"):
    assert getattr(pul.queue, name) is getattr(persisting.queue, name), name
    assert getattr(module, name) is getattr(persisting.queue, name), name
from pulsing import streaming
assert streaming.write_queue.__module__.startswith("pulsing.")
assert streaming.register_backend.__module__.startswith("pulsing.")
assert streaming.get_backend_class("memory").__module__.startswith("pulsing.")
print("done")
"""

WITHOUT = """
import asyncio, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pulsing", "pyspark"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import persisting
from persisting.queue import read_queue, write_queue
async def main():
    async with await write_queue(topic="t", storage_path=sys.argv[1], backend="lance") as writer:
        await writer.put({"id": 1})
    async with await read_queue(topic="t", storage_path=sys.argv[1]) as reader:
        assert await reader.get() == [{"id": 1}]
asyncio.run(main())
try:
    import pulsing
except ModuleNotFoundError as exc:
    assert exc.name == "pulsing"
print("done")
"""


@pytest.mark.parametrize("order", ["pulsing,persisting", "persisting,pulsing"])
def test_missing_names_are_added_and_none_of_pulsings_is_replaced(order: str) -> None:
    assert run(NAMES, order).endswith("done\n")


def test_persisting_works_without_pulsing(tmp_path: Path) -> None:
    assert run(WITHOUT, tmp_path) == "done\n"


def test_pulsing_queue_keeps_its_own_write_and_read() -> None:
    import pulsing as pul

    added = set(vars(pul.queue))
    assert set(OURS) <= added
    assert not added & {"write", "read"}


@pytest.mark.parametrize("backend", ["lance", "persisting"])
async def test_pulsing_queues_store_through_our_backends(
    system: Any, tmp_path: Path, backend: str
) -> None:
    writer = await system.queue.write(
        "native", backend=backend, storage_path=str(tmp_path / "native"), num_buckets=2
    )
    await writer.put([{"id": str(number), "n": number} for number in range(60)])
    await writer.flush()
    reader = await system.queue.read(
        "native", backend=backend, storage_path=str(tmp_path / "native"), num_buckets=2
    )
    found: list[dict[str, Any]] = []
    while records := await reader.get(limit=25):
        found += records
    assert sorted(record["n"] for record in found) == list(range(60))
    assert len(list(tmp_path.glob("native/**/data.lance"))) == 2


@pytest.mark.parametrize("backend", ["lance", "persisting", "memory"])
async def test_pulsing_streaming_functions_store_through_our_backends(
    system: Any, tmp_path: Path, backend: str
) -> None:
    from pulsing import streaming

    options = {"backend": backend, "storage_path": str(tmp_path / "s"), "num_buckets": 2}
    writer = await streaming.write_queue(system, "streaming", **options)
    for number in range(10):
        await writer.put({"id": str(number)})
    reader = await streaming.read_queue(system, "streaming", **options)
    assert sorted(int(r["id"]) for r in await reader.get(limit=100)) == list(range(10))
    await reader.get(limit=10, wait=True, timeout=0.2)
    reader.set_offset(0)
    assert len(await reader.get(limit=100)) == 10


async def test_pulsing_lists_our_backends_and_keeps_its_own(system: Any) -> None:
    from pulsing import streaming

    assert {"memory", "lance", "persisting"} <= set(streaming.list_backends())
    assert streaming.get_backend_class("memory") is streaming.MemoryBackend


class ProtocolBackend:
    """Only the methods of our protocol, with its order of arguments."""

    def __init__(self, bucket_id: int, storage_path: str, batch_size: int = 100) -> None:
        self._records: list[dict[str, Any]] = []

    async def put(self, record: dict[str, Any]) -> None:
        self._records.append(record)

    async def put_batch(self, records: list[dict[str, Any]]) -> None:
        self._records += records

    async def get(self, offset: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        return self._records[offset : None if limit is None else offset + limit]

    async def get_stream(self, offset: int = 0, limit: int | None = None, block: bool = False):
        for record in await self.get(offset, limit):
            yield record

    async def flush(self) -> None:
        pass

    async def stats(self) -> dict[str, Any]:
        return {}

    def total_count(self) -> int:
        return len(self._records)


@pytest.mark.parametrize("name", ["lance", "mine"])
@pytest.mark.parametrize("cls", [LanceBackend, PersistingBackend, MemoryBackend, ProtocolBackend])
async def test_a_backend_registered_with_pulsing_reads_back_its_records(
    system: Any, tmp_path: Path, cls: type, name: str
) -> None:
    from pulsing import streaming

    before = streaming.get_backend_class("lance")
    streaming.register_backend(name, cls)
    try:
        options = {"backend": name, "storage_path": str(tmp_path / "s"), "num_buckets": 1}
        topic = f"registered-{name}-{cls.__name__}"
        writer = await streaming.write_queue(system, topic, **options)
        await writer.put([{"id": str(number)} for number in range(10)])
        reader = await streaming.read_queue(system, topic, **options)
        found = [await reader.get(limit=4) for _ in range(4)]
        assert [len(records) for records in found] == [4, 4, 2, 0]
        assert [int(record["id"]) for records in found for record in records] == list(range(10))
        waiting = asyncio.create_task(reader.get(limit=1, wait=True, timeout=30))
        await asyncio.sleep(0.1)
        await writer.put({"id": "10"})
        assert await waiting == [{"id": "10"}]
    finally:
        streaming.register_backend("lance", before)


async def test_a_backend_with_pulsings_order_of_arguments_is_registered_unchanged() -> None:
    from pulsing import streaming

    class Theirs(streaming.MemoryBackend):
        pass

    streaming.register_backend("theirs", Theirs)
    assert streaming.get_backend_class("theirs") is Theirs
