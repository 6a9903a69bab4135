"""Owners of a topic's buckets without a network: they move buckets, lose requests and replies.

The client's side and the owner's side are the real ones; the transport, the hosts and the storage
are simulated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any

from persisting.cluster import wire
from persisting.cluster.node_locator import NodeLocator
from persisting.cluster.owned_topic import OwnedTopic
from persisting.cluster.placement import bucket_key
from persisting.cluster.service import BucketService
from persisting.cluster.transport import HOST_ENDPOINT, Answered, PostingTarget, Unreachable
from persisting.cluster.wire import Reply, Request
from persisting.errors import BucketClosed, SchemaError, StorageError
from persisting.records.record_columns import RecordColumns
from persisting.topic.bucket_client import Rows

PLACE = "/data/t"


class StoredBucket:
    """What a bucket has stored, whoever owns it: it takes each producer sequence once."""

    def __init__(self, chance: random.Random) -> None:
        self.ids: list[int] = []
        self.numbers: dict[str, int] = {}
        self._chance = chance
        self._writing = asyncio.Lock()

    async def put(self, rows: Rows, sequence: tuple[str, int]) -> None:
        async with self._writing:
            for _ in range(self._chance.randrange(3)):
                await asyncio.sleep(0)
            self.check(rows)
            self.store(rows, sequence)

    def check(self, rows: Rows) -> None:
        if any("bad" in row for row in records_of(rows)):
            raise SchemaError("field 'bad' does not fit")

    def store(self, rows: Rows, sequence: tuple[str, int]) -> None:
        producer, number = sequence
        if number > self.numbers.get(producer, -1):
            self.numbers[producer] = number
            self.ids += [row["id"] for row in records_of(rows)]

    async def last_number(self, writer: str) -> int:
        return self.numbers.get(writer, -1)

    async def is_queued(self, sequence: tuple[str, int]) -> bool:
        return False


def records_of(rows: Rows) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = rows.to_records() if isinstance(rows, RecordColumns) else rows
    return records


class StoredTopic:
    """The handle that an owner has on the topic."""

    def __init__(self, buckets: dict[int, StoredBucket], is_atomic: bool) -> None:
        self._buckets, self._is_atomic = buckets, is_atomic

    async def put_parts(self, parts: list[tuple[int, Rows]], sequence: tuple[str, int]) -> None:
        if self._is_atomic:
            await asyncio.sleep(0)
            for bucket, rows in parts:
                self._buckets[bucket].check(rows)
            for bucket, rows in parts:
                self._buckets[bucket].store(rows, sequence)
            return
        puts = [self._buckets[bucket].put(rows, sequence) for bucket, rows in parts]
        for result in await asyncio.gather(*puts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


class Owners:
    """Nodes that own buckets: a :class:`~persisting.cluster.transport.Transport` to them."""

    node = "client"

    def __init__(
        self,
        nodes: int,
        buckets: int,
        *,
        seed: int = 0,
        is_atomic: bool = True,
        takes_posts: bool = False,
    ) -> None:
        self._takes_posts = takes_posts
        self.posted = 0
        """Requests that were sent without a task."""
        self.chance = random.Random(seed)
        self.stored = {bucket: StoredBucket(self.chance) for bucket in range(buckets)}
        handle: Any = StoredTopic(self.stored, is_atomic)
        self.topics = {f"n{number}": OwnedTopic(handle) for number in range(nodes)}
        self.owner: dict[int, str] = {}
        self.old_nodes: set[str] = set()
        """Nodes of a version that takes puts to one bucket only."""
        self.lossiness = 0.0
        self.calls: list[tuple[str, str]] = []
        """Node and operation of every put."""
        self._late: set[asyncio.Task[Any]] = set()

    def locator(self, bucket: int) -> NodeLocator:
        transport: Any = self
        args = {"bucket": bucket, "config": {"topic": "t"}}
        return NodeLocator(transport, bucket_key(PLACE, bucket), Request("open", args))

    async def hosts(self) -> list[str]:
        return list(self.topics)

    async def connect(self, endpoint: str, node: str, timeout: float) -> OwnerConnection:
        kind = PostingConnection if self._takes_posts else OwnerConnection
        return kind(self, endpoint, node)

    def open(self, bucket: int, node: str) -> Reply:
        holder = self.owner.setdefault(bucket, node)
        if holder != node:
            return Reply({"locked": {"node": holder}, "text": f"locked by node {holder}"})
        topic = self.topics[node]
        if bucket not in topic.services:
            stored: Any = self.stored[bucket]
            put_parts = None if node in self.old_nodes else topic.put_parts
            topic.services[bucket] = BucketService(stored, PLACE, bucket, put_parts)
        return Reply({"node": node})

    async def move(self, bucket: int, node: str) -> None:
        """Have the owner give up a bucket; another node owns it from now on."""
        previous = self.owner.get(bucket)
        if previous is not None:
            service = self.topics[previous].services.pop(bucket, None)
            if service is not None:
                await service.close()
        self.owner[bucket] = node

    async def finish_late_requests(self) -> None:
        await asyncio.gather(*self._late, return_exceptions=True)

    async def answer(self, node: str, endpoint: str, request: Request) -> Reply:
        if endpoint == HOST_ENDPOINT:
            return self.open(request.args["bucket"], node)
        bucket = int(endpoint.split("/")[-2])
        service = self.topics[node].services.get(bucket)
        if request.op in ("put", "put_parts"):
            self.calls.append((node, request.op))
        if service is None:
            raise Unreachable(f"node {node} has no such actor")
        fault = self.chance.random()
        if fault < self.lossiness / 3:
            raise Unreachable("the request was lost")
        if fault < 2 * self.lossiness / 3:
            self._carry_out_late(service, request)
            raise Unreachable("the reply took too long")
        reply = await service.answer(request)
        if fault < self.lossiness:
            raise Unreachable("the reply was lost")
        assert isinstance(reply, Reply)
        return wire.raise_error(reply)

    def _carry_out_late(self, service: BucketService, request: Request) -> None:
        delay = self.chance.choice([0, 0.002, 0.01])

        async def carry_out() -> None:
            await asyncio.sleep(delay)
            await service.answer(request)

        task = asyncio.create_task(carry_out())
        self._late.add(task)


class OwnerConnection:
    def __init__(self, owners: Owners, endpoint: str, node: str) -> None:
        self._owners, self._endpoint, self.node = owners, endpoint, node

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        for _ in range(self._owners.chance.randrange(4)):
            await asyncio.sleep(0)
        # A request crosses the network as bytes.
        request = wire.decode_request(wire.encode(request))
        return await self._owners.answer(self.node, self._endpoint, request)

    def stream(self, request: Request) -> AsyncGenerator[Reply, None]:
        raise BucketClosed("the simulation has no streams")


class PostingConnection(OwnerConnection, PostingTarget):
    """A connection that sometimes cannot send immediately."""

    def post(self, request: Request, answered: Answered) -> bool:
        if self._owners.chance.random() < self._owners.lossiness:
            return False
        self._owners.posted += 1
        asking = asyncio.ensure_future(self.ask(request))
        asking.add_done_callback(lambda done: answered(self._answer(done)))
        return True

    def _answer(self, done: asyncio.Future[Reply]) -> Reply | Exception:
        failure = done.exception()
        if failure is None:
            return done.result()
        if isinstance(failure, StorageError):  # it crosses the network as a reply
            return wire.error_reply(failure)
        assert isinstance(failure, Exception)
        return failure
