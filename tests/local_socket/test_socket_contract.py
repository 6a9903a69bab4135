"""The queue contract for a topic that another process owns."""

from __future__ import annotations

from support.queue_contract import QueueContract


class TestQueue(QueueContract):
    pass
