"""Groups in an object store: what they have committed, and who keeps a work group.

    groups/<group>/bucket_<i>.json      committed offset, generation, member    swapped
    groups/<group>/work/keeper.json     who keeps a work group                  swapped

A member changes an offset by compare-and-swap, with the version that it wrote last. So a member
that has lost the bucket cannot commit, however late its request arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from persisting.bucket.group_offsets import WORK_FOLDER, Committed, Hold
from persisting.errors import WALError
from persisting.store.object_store import ObjectStore
from persisting.store.register import Register
from persisting.wal import sealing
from persisting.wal.slots import slots_prefix

GROUPS = "groups"
FORMAT = 1
NOBODY = ""
_TRIES = 20


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


class KeeperRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the object that makes a group a work group."""

    owner: str = NOBODY
    """The log of the process that keeps the group; empty if the last one has given it up."""
    log: str = NOBODY
    """The log that holds the group's journal; empty before there is one."""
    left: list[str] = []
    """Logs of former keepers that may not be deleted yet."""
    closed: bool = False
    """Whether the log is closed: nothing can arrive there late."""
    socket: str = ""
    """Where that process listens on its machine; empty if it does not."""
    deleted: bool = False
    """Whether the group was deleted. The object stays, because a DELETE takes no condition: it
    could remove a group that another process has just created under the same name."""
    format: int = FORMAT


def keeper_key(group: str) -> str:
    return f"{GROUPS}/{group}/{WORK_FOLDER}/keeper.json"


def keeper_register(store: ObjectStore, group: str) -> Register[KeeperRecord]:
    """``store`` is that of the topic."""
    return Register(store, keeper_key(group), KeeperRecord, FORMAT)


def is_work_group(store: ObjectStore, group: str) -> bool:
    held = keeper_register(store, group).read()
    return held is not None and not held.content.deleted


def read_journal(store: ObjectStore, group: str) -> tuple[list[bytes], str]:
    """Return the slots of the journal of a work group, and their place; nothing if the group was
    deleted. Its keeper may be writing, and another process may be taking it over."""
    register = keeper_register(store, group)
    held = register.read()
    for _ in range(_TRIES):
        if held is None or held.content.deleted or not held.content.log:
            return [], ""
        log = held.content.log
        contents = sealing.present_slots(store, log)
        last, held = held, register.read()
        # Otherwise the next keeper may have deleted the journal meanwhile.
        if contents and held is not None and held.version == last.version:
            return contents, str(store.address / slots_prefix(log))
    raise WALError(f"the journal of work group {group!r} changes too often to be read; try again")


def groups_in(store: ObjectStore) -> dict[str, bool]:
    """Return the names of the topic's groups, and whether each is a work group."""
    keys: dict[str, list[str]] = {}
    for key in store.list(GROUPS):
        keys.setdefault(key.split("/")[1], []).append(key)
    found = {}
    for name in sorted(keys):
        works = keeper_key(name) in keys[name] and is_work_group(store, name)
        if works or keys[name] != [keeper_key(name)]:
            found[name] = works
    return found


def journals_in(store: ObjectStore) -> set[str]:
    """Return the logs that hold journals of work groups, or held them and may not be deleted yet.

    A keeper is named here before it writes to its log.
    """
    names: set[str] = set()
    for key in store.list(GROUPS):
        group = key.split("/")[1]
        held = keeper_register(store, group).read() if key == keeper_key(group) else None
        if held is not None:
            names |= {held.content.owner, held.content.log, *held.content.left}
    return names - {NOBODY}


def holds(
    store: ObjectStore, bucket: int, restored: Sequence[int], *, consumers: bool, workers: bool
) -> list[Hold]:
    """Return what the groups hold, in the form of :func:`persisting.bucket.group_offsets.holds`."""
    if not consumers and not workers:
        return []
    return [
        Hold(
            read_committed(store, group, bucket).now(restored),
            f"{'work group' if works else 'group'} {group!r}",
        )
        for group, works in groups_in(store).items()
        if (workers if works else consumers)
    ]
