"""The topics of a storage folder, or of a prefix in an object store, opened for reading and shared
by the requests. Blocking."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from persisting.concurrency.pool import in_thread
from persisting.errors import NoSuchTopic, StorageError
from persisting.lock import owner_of
from persisting.topic import spec as topics
from persisting.topic.topic_files import TopicFolder

_T = TypeVar("_T")
_MAX_OPEN = 32
_LINK_LEVELS = 3
"""Folders whose links are checked: of the topic, of its buckets, and of their tables."""


class Signature(NamedTuple):
    """What the files of a topic look like from outside."""

    versions: list[Any]
    """What changes with every flush."""
    others: list[Any]


class _OpenTopic:
    """A topic that stays open between requests, used by one thread at a time."""

    def __init__(self, source: TopicFolder, identity: object) -> None:
        self.source, self.identity = source, identity
        self.lock = threading.Lock()


class TopicsView(ABC):
    """Finds topics below one place, and keeps those open that were asked for last."""

    place: str
    """The ``storage_path`` of the topics."""
    is_store = False
    poll_seconds: float
    """How often a live tail polls."""
    sample_seconds: float
    """How often all topics are sampled."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, str], _OpenTopic] = OrderedDict()
        self._guard = threading.Lock()

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all topics."""

    @abstractmethod
    def check(self, topic: str) -> None:
        """Raise if there is no such topic."""

    @abstractmethod
    def open(self, topic: str) -> TopicFolder:
        """Open a topic; what stays open is in :meth:`read`."""

    @abstractmethod
    def signature(self, topic: str) -> Signature:
        """Return what changes with every put, flush, commit and change of owners."""

    @abstractmethod
    def _identity(self, topic: str) -> object:
        """Return what changes when a topic is created again or gets other options; raise if there
        is no such topic."""

    async def read(
        self, topic: str, call: Callable[[TopicFolder], _T], reader: str = "pages"
    ) -> _T:
        """Call with the open topic, in a thread; calls of one reader for one topic wait for each
        other."""
        return await in_thread(self.read_now, topic, call, reader)

    def read_now(self, topic: str, call: Callable[[TopicFolder], _T], reader: str = "pages") -> _T:
        """Like :meth:`read`, but in this thread."""
        opened = self._opened(topic, reader)
        with opened.lock:
            return call(opened.source)

    def _opened(self, topic: str, reader: str) -> _OpenTopic:
        identity, key = self._identity(topic), (topic, reader)
        with self._guard:
            opened = self._open.get(key)
        if opened is None or opened.identity != identity:
            opened = _OpenTopic(self.open(topic), identity)
        with self._guard:
            self._open[key] = opened
            self._open.move_to_end(key)
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        return opened


class StorageView(TopicsView):
    """Finds topics below one folder; no name leads out of it."""

    poll_seconds = 0.2
    sample_seconds = 5.0

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.place = root, str(root)
        self._resolved = root.resolve()

    def names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                found = [entry.name for entry in entries if self._is_topic(entry)]
        except OSError as exc:
            raise StorageError(f"cannot list {self.root}: {exc.strerror}") from exc
        return sorted(found)

    def _is_topic(self, entry: os.DirEntry[str]) -> bool:
        if entry.name.startswith(".") or not _is_text(entry.name):
            return False
        if not os.path.exists(os.path.join(entry.path, topics.FILE)):
            return False
        return not entry.is_symlink() or self._is_inside(Path(entry.path))

    def check(self, topic: str) -> None:
        self.folder(topic)

    def open(self, topic: str) -> TopicFolder:
        return TopicFolder.open(self.folder(topic))

    def folder(self, topic: str) -> Path:
        """Return the folder of a topic, or raise if there is none or it is elsewhere."""
        folder = topics.topic_folder(self.root, topic)
        if not self._is_inside(folder):
            raise NoSuchTopic(f"the folder of topic {topic!r} is a link out of {self.root}")
        if not (folder / topics.FILE).exists():
            raise NoSuchTopic(topics.no_such_topic(folder))
        self._check_links(folder, _LINK_LEVELS)
        return folder

    def _check_links(self, folder: str | Path, levels: int) -> None:
        """Raise if a link in a topic leads out of the storage folder.

        The console would show files that it was not told to show, and change them.
        """
        try:
            entries = list(os.scandir(folder))
        except OSError:
            return
        for entry in entries:
            if entry.is_symlink() and not self._leads_inside(entry.path):
                raise NoSuchTopic(
                    f"{entry.path} is a link out of {self.root}, so the console does not open it"
                )
            if levels > 1 and entry.is_dir():
                self._check_links(entry.path, levels - 1)

    def _leads_inside(self, path: str) -> bool:
        try:
            return Path(path).resolve().is_relative_to(self._resolved)
        except (OSError, RuntimeError):  # a loop
            return False

    def signature(self, topic: str) -> Signature:
        folder = self.root / topic
        parts: list[Any] = [_stat(folder / "topic.json"), _stat(folder / "schema.json")]
        versions = []
        for name in _names(folder):
            if name.startswith("bucket_"):
                bucket = folder / name
                owner = owner_of(bucket)
                parts.append((name, owner and owner.get("pid")))
                versions.append((name, _stat(bucket / "data.lance/_versions")))
                parts.append(_files(bucket / "wal"))
        for log_name in _names(folder / "log"):
            parts.append(_files(folder / "log" / log_name))
        for group in _names(folder / "groups"):
            parts.append(_files(folder / "groups" / group))
        return Signature(versions, parts)

    def _identity(self, topic: str) -> object:
        folder = self.folder(topic)
        stat = _stat(folder / topics.FILE)
        with suppress(OSError):
            return stat, os.stat(folder / topics.FILE).st_ino, os.stat(folder).st_ino
        return ()

    def _is_inside(self, folder: Path) -> bool:
        return folder.resolve().parent == self._resolved


def _is_text(name: str) -> bool:
    """Return whether a page can show a name; files of other programs may have any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _files(folder: Path) -> list[Any]:
    return [(name, _stat(folder / name)) for name in _names(folder)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
