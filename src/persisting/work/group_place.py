"""Where the work groups of a topic are stored: in its folder, or in an object store."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple, Protocol

from persisting import fs as filesystem
from persisting.bucket import store_groups
from persisting.bucket.group_offsets import groups_in, is_work_group
from persisting.bucket.store_groups import NOBODY, keeper_register
from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.lock import owner_of
from persisting.store.object_store import ObjectStore, open_store
from persisting.suggestions import choices
from persisting.topic import spec as topics
from persisting.topic import store_config, store_work_status
from persisting.topic.bucket_client import Topic
from persisting.topic.groups import FOLDER, group_folder
from persisting.topic.spec import TopicConfig
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_files import TopicFolder
from persisting.topic.work_status import WorkStatus, read_status
from persisting.wal import sealing
from persisting.wal.lease import LEASE_SECONDS, is_held_here
from persisting.work import store_group
from persisting.work.group_storage import FolderGroup, GroupStorage, journal_folder
from persisting.work.journal import read_state
from persisting.work.state import GroupState
from persisting.work.store_group import StoreGroup

LETTERS = ".dead"
"""The suffix of the topic for the dead letters of another one."""


class KeeperNote(NamedTuple):
    """The process that keeps a group."""

    owner: dict[str, Any]
    socket: str
    """Where it listens on this machine; empty if it does not."""
    is_here: bool
    """Whether it is this process, which is about to start or to end keeping it."""
    beat: int | None
    """The heartbeat of a keeper in an object store, which is alive if it changes. None in a folder,
    where a keeper with a note is alive."""


class GroupPlace(Protocol):
    """The stored groups of one topic. The methods block."""

    config: TopicConfig
    pause_seconds: float
    """How long to wait before a keeper that was lost is searched for again."""

    @property
    def key(self) -> Hashable:
        """Equal for two places of one topic."""

    def __str__(self) -> str:
        """Return the place of the topic."""

    def check_same_topic(self) -> None:
        """Raise if the topic was deleted since it was opened, even if it was created again."""

    def check_mode(self, group: str) -> None:
        """Raise if a group is one that commits offsets."""

    def keep(self, group: str, *, socket: str = "") -> GroupStorage:
        """Hold a group, or raise :class:`KeptElsewhere`; ``socket`` is noted for others."""

    def keeper_note(self, group: str) -> KeeperNote | None:
        """Return who keeps a group, None if this process may. Makes few requests, and does not
        wait: a keeper in an object store counts as dead some time after its last heartbeat."""

    def work_groups(self) -> list[str]:
        """Return the names of the work groups."""

    def read_state(self, group: str) -> GroupState:
        """Return what the journal of a group holds, without keeping it."""

    def read_status(self, group: str) -> WorkStatus:
        """Return the numbers of a group that were noted last."""

    def load_letters(self) -> TopicConfig | None:
        """Return the configuration of the topic for dead letters, None if there is none."""


def is_in_memory(topic: Topic) -> bool:
    return topic.folder is None and getattr(topic, "store", None) is None


def place_of(topic: Topic) -> GroupPlace:
    """Return where the groups of an open topic are."""
    store = getattr(topic, "store", None)
    if store is not None:
        return StorePlace(store, topic.config)
    return FolderPlace(topic.folder, topic.config)


def check_group(topic: TopicFolder, group: str) -> GroupPlace:
    """Return where the groups of a stored topic are; raise if there is no such work group."""
    place: GroupPlace
    if isinstance(topic, StoreTopic):
        place = StorePlace(topic.store, topic.config)
    else:
        place = FolderPlace(topic.folder, topic.config)
    names = place.work_groups()
    if group not in names:
        raise InvalidArgument(f"there is no work group {group!r}; {choices(group, names)}")
    return place


def reads_by_offset(group: str) -> InvalidArgument:
    return InvalidArgument(
        f"group {group!r} reads by offset: it cannot be read with mode='work'. Use another "
        "group, or delete this one with 'persisting groups TOPIC GROUP --delete'"
    )


class FolderPlace:
    """The groups of a topic in a folder."""

    pause_seconds = 0.02

    def __init__(self, folder: Path, config: TopicConfig) -> None:
        self.folder, self.config = Path(folder).resolve(), config

    @property
    def key(self) -> Hashable:
        return self.folder

    def __str__(self) -> str:
        return str(self.folder)

    def check_same_topic(self) -> None:
        found = topics.load(self.folder, filesystem.current())
        _check_same(found, self.config, str(self.folder.parent))

    def check_mode(self, group: str) -> None:
        folder = group_folder(self.folder, group)
        if folder.is_dir() and not is_work_group(folder) and any(folder.glob("bucket_*.json")):
            raise reads_by_offset(group)

    def keep(self, group: str, *, socket: str = "") -> FolderGroup:
        note = {"socket": socket} if socket else {}
        return FolderGroup(self.folder, group, filesystem.current(), **note)

    def keeper_note(self, group: str) -> KeeperNote | None:
        note = owner_of(journal_folder(self.folder, group))
        if note is None:
            return None
        in_between = not note.get("pid") or bool(note.get("clean"))
        is_here = in_between or note.get("pid") == os.getpid()
        return KeeperNote(note, note.get("socket", ""), is_here, None)

    def work_groups(self) -> list[str]:
        found = groups_in(self.folder / FOLDER, filesystem.current())
        return [group.name for group in found if is_work_group(group)]

    def read_state(self, group: str) -> GroupState:
        return read_state(journal_folder(self.folder, group))

    def read_status(self, group: str) -> WorkStatus:
        return read_status(group_folder(self.folder, group), filesystem.current())

    def load_letters(self) -> TopicConfig | None:
        folder = self.folder.parent / (self.config.topic + LETTERS)
        return topics.load(folder, filesystem.current())


class StorePlace:
    """The groups of a topic in an object store."""

    pause_seconds = 0.25

    def __init__(self, store: ObjectStore, config: TopicConfig) -> None:
        """``store`` is that of the topic."""
        self.store, self.config = store, config

    @property
    def key(self) -> Hashable:
        return str(self.store.address)

    def __str__(self) -> str:
        return str(self.store.address)

    def check_same_topic(self) -> None:
        found = store_config.load(self.store)
        _check_same(found, self.config, str(self.store.address.parent))

    def check_mode(self, group: str) -> None:
        if store_groups.groups_in(self.store).get(group) is False:
            raise reads_by_offset(group)

    def keep(self, group: str, *, socket: str = "") -> StoreGroup:
        seconds = float(self.config.options.get("lease", LEASE_SECONDS))
        return StoreGroup(self.store, group, self.config.num_buckets, seconds, socket=socket)

    def keeper_note(self, group: str) -> KeeperNote | None:
        held = keeper_register(self.store, group).read()
        if held is None or held.content.owner == NOBODY:
            return None
        record = held.content
        lease = sealing.look_at_owner(self.store, record.owner)
        if lease is None:
            return None
        is_on_this_machine = lease.owner.host == gethostname()
        return KeeperNote(
            store_group.owner_note(lease),
            record.socket if is_on_this_machine else "",
            is_held_here(record.owner),
            lease.beat,
        )

    def work_groups(self) -> list[str]:
        return [group for group, works in store_groups.groups_in(self.store).items() if works]

    def read_state(self, group: str) -> GroupState:
        return store_group.read_state(self.store, group)

    def read_status(self, group: str) -> WorkStatus:
        return store_work_status.read_status(self.store, group)

    def letters_store(self) -> ObjectStore:
        """Return the store of the topic for dead letters. No request is made."""
        address = self.store.address
        return open_store(address.parent / (address.name + LETTERS), self.store.options)

    def load_letters(self) -> TopicConfig | None:
        return store_config.load(self.letters_store())


def _check_same(found: TopicConfig | None, config: TopicConfig, root: str) -> None:
    if found is None or found.id != config.id:
        what = "deleted" if found is None else "deleted and created again"
        raise NoSuchTopic(
            f"topic {config.topic!r} in {root} was {what} since this reader was opened; "
            "open a new reader"
        )
