"""NATS JetStream: a durable pull consumer, acknowledgements that the server confirms."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from peersbench import servers
from peersbench.jetstream_store import STREAM, JetStreamStore, missing, program
from peersbench.record_kinds import Kind, Packer

from workbench.crowd import LEASE, SMALL, WORKERS, Crowd
from workbench.peer import WorkPeer, WorkStore

_CONSUMER = "g"


class JetStreamWork(JetStreamStore, WorkStore):
    """A stream with a durable consumer."""

    workers = "jetstream_work"

    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__(folder, kind)
        self.address = f"nats://127.0.0.1:{self.port}"

    def prepare_read(self) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig

        settings = ConsumerConfig(
            durable_name=_CONSUMER,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=LEASE,
            max_ack_pending=10 * WORKERS,
        )
        self.run(self.jetstream.add_consumer(STREAM, settings))

    def unfinished(self) -> int:
        found = self.run(self.jetstream.consumer_info(STREAM, _CONSUMER))
        return int(found.num_pending) + int(found.num_ack_pending)


class JetStreamWorkers:
    """Every worker pulls one message, and waits until its acknowledgement is confirmed."""

    def __init__(self, client: Any, subscriptions: list[Any]) -> None:
        self._client, self._subscriptions = client, subscriptions
        self._packer = Packer(SMALL)

    async def work(self, crowd: Crowd) -> None:
        await asyncio.gather(*(self._worker(pull, crowd) for pull in self._subscriptions))

    async def _worker(self, subscription: Any, crowd: Crowd) -> None:
        import nats.errors

        while crowd.more:
            try:
                (message,) = await subscription.fetch(1, timeout=1)
            except nats.errors.TimeoutError:
                return
            crowd.claimed.append(self._packer.unpack(message.data))
            await message.ack_sync(timeout=LEASE)
            crowd.finish()

    async def close(self) -> None:
        await self._client.close()


async def connect(address: str, workers: int) -> JetStreamWorkers:
    import nats

    client = await nats.connect(address)
    stream = client.jetstream()
    subscriptions = [
        await stream.pull_subscribe_bind(consumer=_CONSUMER, stream=STREAM) for _ in range(workers)
    ]
    return JetStreamWorkers(client, subscriptions)


PEER = WorkPeer(
    "JetStream",
    "as sync_interval: always makes it",
    JetStreamWork,
    missing,
    lambda: servers.version(program()),
)
