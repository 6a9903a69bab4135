"""Committed offsets of consumer groups in an object store: ``groups/<group>/bucket_<i>.json``.

A member changes the object by compare-and-swap, with the version that it wrote last. So a member
that has lost the bucket cannot commit, however late its request arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from persisting.bucket.group_offsets import Committed, Hold
from persisting.store.object_store import ObjectStore
from persisting.store.register import Register

GROUPS = "groups"
FORMAT = 1
NOBODY = ""


class StoredOffset(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the object."""

    offset: int = 0
    generation: int = 0
    epoch: int = 0
    member: str = NOBODY
    """The member that reads the bucket; empty if it has given the bucket back."""
    format: int = FORMAT

    @property
    def committed(self) -> Committed:
        return Committed(self.offset, self.generation, self.epoch)


def offset_register(store: ObjectStore, group: str, bucket: int) -> Register[StoredOffset]:
    """``store`` is that of the topic."""
    return Register(store, f"{GROUPS}/{group}/bucket_{bucket}.json", StoredOffset, FORMAT)


def read_committed(store: ObjectStore, group: str, bucket: int) -> Committed:
    """Read the committed offset of a bucket; 0 before the first commit."""
    held = offset_register(store, group, bucket).read()
    return Committed() if held is None else held.content.committed


def groups_in(store: ObjectStore) -> list[str]:
    """Return the names of the topic's groups."""
    return sorted({key.split("/")[1] for key in store.list(GROUPS)})


def holds(store: ObjectStore, bucket: int, restored: Sequence[int]) -> list[Hold]:
    """Return what the groups hold; ``restored`` are the ends of the bucket after its restores."""
    return [
        Hold(read_committed(store, group, bucket).now(restored), f"group {group!r}")
        for group in groups_in(store)
    ]
