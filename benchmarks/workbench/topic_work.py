"""Our work groups, as a user reads them: through ``read_queue(mode="work")``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from peersbench import persisting_store
from peersbench.record_kinds import Kind, Record
from peersbench.topic_store import TopicStore

from persisting.queue import read_queue
from workbench.crowd import LEASE, Crowd
from workbench.peer import WorkPeer, WorkStore

_BUCKETS = 4
TASKS, MEMBERS, RUN = "tasks", "members", "run"


class TopicWork(TopicStore, WorkStore):
    """A topic with every put synced. The process of the writer keeps the group."""

    workers = "topic_work"
    kind = TASKS

    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__(folder, _BUCKETS, 0.0)
        self.address = f"{self.kind}:{folder}"
        self._reader: Any = None

    def prepare_read(self) -> None:
        self._reader = self.run(_reader(self._place["storage_path"]))

    def unfinished(self) -> int:
        stats: dict[str, int] = self.run(self._reader.stats())
        return stats["unacknowledged"]

    def drain(self) -> list[Record]:
        return WorkStore.drain(self)

    def close(self) -> None:
        if self._reader is not None:
            self.run(self._reader.close())
        super().close()


class MembersWork(TopicWork):
    kind = MEMBERS


class RunWork(TopicWork):
    kind = RUN


async def _reader(folder: str) -> Any:
    return await read_queue(topic="t", storage_path=folder, group="g", mode="work", lease=LEASE)


class FetchingWorkers:
    """Workers that fetch single records, all from one reader or each from its own."""

    def __init__(self, readers: list[Any]) -> None:
        self._readers = readers

    async def work(self, crowd: Crowd) -> None:
        count = len(self._readers)
        readers = [self._readers[number % count] for number in range(crowd.workers)]
        await asyncio.gather(*(self._worker(reader, crowd) for reader in readers))

    async def _worker(self, reader: Any, crowd: Crowd) -> None:
        while crowd.more:
            deliveries = await reader.fetch(1)
            if not deliveries:
                return
            (delivery,) = deliveries
            crowd.claimed.append(delivery.record)
            await delivery.ack()
            crowd.finish()

    async def close(self) -> None:
        for reader in self._readers:
            await reader.close()


class RunningWorkers(FetchingWorkers):
    """The workers are the handlers of one call of ``run``."""

    async def work(self, crowd: Crowd) -> None:
        if crowd.most is not None:
            await super().work(crowd)
            return
        (reader,) = self._readers

        async def handle(record: Record) -> None:
            crowd.claimed.append(record)

        count = await reader.run(handle, concurrency=crowd.workers, wait=False)
        for _ in range(count):
            crowd.finish()


async def connect(address: str, workers: int) -> FetchingWorkers:
    kind, _, folder = address.partition(":")
    readers = [await _reader(folder) for _ in range(workers if kind == MEMBERS else 1)]
    return (RunningWorkers if kind == RUN else FetchingWorkers)(readers)


def _peer(name: str, store: type[TopicWork]) -> WorkPeer:
    return WorkPeer(name, "both synced", store, version=persisting_store.version)


ONE = _peer("work group, fetch(1)", TopicWork)
MANY = _peer("work group, a member each", MembersWork)
HANDLERS = _peer("work group, run()", RunWork)
PEERS = (ONE, HANDLERS, MANY)
