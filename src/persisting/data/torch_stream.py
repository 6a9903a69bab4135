"""A stream that torch recognizes as an iterable dataset. Imported only where torch is."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from persisting.data.pinned_stream import Worker
from persisting.data.stream import TopicStream


class TorchTopicStream(TopicStream, IterableDataset[Any]):
    """The same stream, for ``torch.utils.data.DataLoader``."""

    def _worker(self) -> Worker | None:
        info = get_worker_info()
        return None if info is None else Worker(info.id, info.num_workers)
