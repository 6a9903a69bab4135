"""The contract of queues, embedded: every bucket belongs to this process."""

from __future__ import annotations

from support.queue_contract import QueueContract


class TestQueue(QueueContract):
    pass
