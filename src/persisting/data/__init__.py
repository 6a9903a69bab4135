"""Training data from topics: datasets, resumable streams, replay buffers.

Names are loaded on first use. Nothing here needs torch, datasets or NumPy beyond what the queue
needs; they are used where they are installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persisting.data.dataset import TopicDataset
    from persisting.data.hugging_face import to_hf
    from persisting.data.replay import ReplayBuffer, Sample
    from persisting.data.stream import TopicStream

__all__ = ["ReplayBuffer", "Sample", "TopicDataset", "TopicStream", "to_hf"]

_LAZY = {
    "ReplayBuffer": "persisting.data.replay",
    "Sample": "persisting.data.replay",
    "TopicDataset": "persisting.data.dataset",
    "TopicStream": "persisting.data.stream",
    "to_hf": "persisting.data.hugging_face",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
