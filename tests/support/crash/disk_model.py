"""Model a disk: what was synced, and what power loss may leave of the rest.

The model reads POSIX strictly. A file's bytes are durable as they were at its last sync. A name is
durable if its folder was synced after the name was created, changed or removed. Power loss may keep
or lose every later change, each name and each sector of a file independently.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

SECTOR = 512
SYNCED_IN_ONE_STEP = {".lock"}
"""Files that are written and synced in one step, without ``persisting.fs``."""


@dataclass(frozen=True)
class File:
    """A file at one point in time: its bytes, and its bytes at the last sync."""

    number: int
    data: bytes
    durable: bytes | None


@dataclass(frozen=True)
class Folder:
    """A folder at one point in time: its entries, and its entries at the last sync."""

    number: int
    current: dict[str, Node]
    durable: dict[str, Node]


Node: TypeAlias = "File | Folder"
Tree: TypeAlias = "dict[Path, bytes | None]"
"""Content of a disk: the bytes of each file, None for a folder."""


class _LiveFile:
    def __init__(self, number: int) -> None:
        self.number, self.data, self.durable = number, b"", None


class _LiveFolder:
    def __init__(self, number: int) -> None:
        self.number = number
        self.current: dict[str, _LiveFile | _LiveFolder] = {}
        self.durable: dict[str, _LiveFile | _LiveFolder] = {}


class Disk:
    """Follows a folder on the real disk. Not thread-safe.

    What the folder holds at first counts as synced; or, with ``before``, as it was synced then: the
    folder must hold what a killed process had left at that time.
    """

    def __init__(self, root: Path, before: Folder | None = None) -> None:
        self.root = root
        self._numbers = iter(range(1, 1 << 62))
        self._top = _LiveFolder(0)
        if before is None:
            self.observe()
            self._sync_everything(self._top)
        else:
            self._top = self._thaw_folder(before, {})
            assert not self.observe(), f"{root} does not hold what was left at that time"

    def observe(self) -> bool:
        """Read what changed on the real disk since the last call; return whether anything did."""
        return self._observe(self.root, self._top)

    def replaced(self, path: Path) -> None:
        """Record that a name refers to a new file, even if its content is the same."""
        folder = self._find(path.parent)
        if isinstance(folder, _LiveFolder):
            folder.current.pop(path.name, None)

    def moved(self, old: Path, new: Path) -> None:
        """Record a rename: the file stays as durable as it was."""
        source, target = self._find(old.parent), self._find(new.parent)
        assert isinstance(source, _LiveFolder)
        assert isinstance(target, _LiveFolder)
        target.current[new.name] = source.current.pop(old.name)

    def sync_file(self, path: Path) -> None:
        found = self._find(path)
        if isinstance(found, _LiveFile):
            found.durable = found.data

    def sync_folder(self, path: Path) -> None:
        found = self._find(path)
        if isinstance(found, _LiveFolder):
            found.durable = dict(found.current)

    def freeze(self) -> Folder:
        frozen = _freeze(self._top, {})
        assert isinstance(frozen, Folder)
        return frozen

    def is_durable(self, path: Path) -> bool:
        """Return whether power loss keeps a file or folder with its current content."""
        folder = self._top
        for name in path.relative_to(self.root).parts:
            below = folder.current.get(name)
            if below is None or folder.durable.get(name) is not below:
                return False
            if isinstance(below, _LiveFile):
                return below.durable == below.data
            folder = below
        return all(self.is_durable(path / name) for name in folder.current)

    def _find(self, path: Path) -> _LiveFile | _LiveFolder | None:
        node: _LiveFile | _LiveFolder | None = self._top
        for name in path.relative_to(self.root).parts:
            node = node.current.get(name) if isinstance(node, _LiveFolder) else None
        return node

    def _observe(self, path: Path, folder: _LiveFolder) -> bool:
        changed = False
        try:
            found = {
                entry.name: entry.is_dir()
                for entry in os.scandir(path)
                if entry.is_dir() or entry.is_file()  # a crash leaves sockets without a meaning
            }
        except FileNotFoundError:  # removed since it was listed; the next call notices
            return False
        for name in set(folder.current) - set(found):
            del folder.current[name]
            changed = True
        for name, is_folder in found.items():
            known = folder.current.get(name)
            if known is None or isinstance(known, _LiveFolder) != is_folder:
                number = next(self._numbers)
                known = _LiveFolder(number) if is_folder else _LiveFile(number)
                folder.current[name] = known
                changed = True
            if isinstance(known, _LiveFolder):
                changed |= self._observe(path / name, known)
            else:
                changed |= self._observe_file(path / name, known)
        return changed

    def _observe_file(self, path: Path, file: _LiveFile) -> bool:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # removed since it was listed; the next call notices
            return False
        changed = data != file.data
        file.data = data
        if path.name in SYNCED_IN_ONE_STEP:
            file.durable = data
        return changed

    def _thaw_folder(self, folder: Folder, seen: dict[int, _LiveFile | _LiveFolder]) -> _LiveFolder:
        live = _LiveFolder(next(self._numbers))
        seen[folder.number] = live
        live.current = {name: self._thaw(node, seen) for name, node in folder.current.items()}
        live.durable = {name: self._thaw(node, seen) for name, node in folder.durable.items()}
        return live

    def _thaw(
        self, node: Node, seen: dict[int, _LiveFile | _LiveFolder]
    ) -> _LiveFile | _LiveFolder:
        if node.number in seen:
            return seen[node.number]
        if isinstance(node, Folder):
            return self._thaw_folder(node, seen)
        live = _LiveFile(next(self._numbers))
        live.data, live.durable = node.data, node.durable
        seen[node.number] = live
        return live

    def _sync_everything(self, folder: _LiveFolder) -> None:
        folder.durable = dict(folder.current)
        for node in folder.current.values():
            if isinstance(node, _LiveFolder):
                self._sync_everything(node)
            else:
                node.durable = node.data


def _freeze(node: _LiveFile | _LiveFolder, seen: dict[int, Node]) -> Node:
    if node.number not in seen:
        if isinstance(node, _LiveFile):
            seen[node.number] = File(node.number, node.data, node.durable)
        else:
            seen[node.number] = Folder(
                node.number,
                {name: _freeze(n, seen) for name, n in node.current.items()},
                {name: _freeze(n, seen) for name, n in node.durable.items()},
            )
    return seen[node.number]


@dataclass(frozen=True)
class Loss:
    """One kind of power loss: which unsynced names are kept, and which unsynced bytes."""

    name: str
    keeps_new: Callable[[], bool]
    keeps_removal: Callable[[], bool]
    content: Callable[[bytes, bytes], bytes]
    """Maps (durable bytes, current bytes) to the bytes after the loss."""
    spares: Callable[[Path], bool] = lambda _: False
    """Whether a path keeps its current content, regardless of the other fields."""

    def __str__(self) -> str:
        return self.name


def _zeroed(durable: bytes, data: bytes) -> bytes:
    return durable + bytes(max(0, len(data) - len(durable)))


LOSE_UNSYNCED = Loss("unsynced-lost", lambda: False, lambda: False, lambda durable, _: durable)
KEEP_EVERYTHING = Loss("everything", lambda: True, lambda: True, lambda _, data: data)
KEEP_NAMES_ONLY = Loss(
    "names-without-bytes", lambda: True, lambda: True, lambda durable, _: durable
)
ZERO_BYTES = Loss("names-with-zeros", lambda: True, lambda: True, _zeroed)
UNDO_REMOVALS = Loss("removals-undone", lambda: True, lambda: False, lambda _, data: data)
UNDO_REMOVALS_LOSE_BYTES = Loss(
    "removals-undone-bytes-lost", lambda: True, lambda: False, lambda d, _: d
)
PARTIAL_LOSSES = (KEEP_NAMES_ONLY, ZERO_BYTES, UNDO_REMOVALS)
"""Losses that are also tried in single folders, with :func:`only_in`."""

FIXED_LOSSES = (
    LOSE_UNSYNCED,
    KEEP_EVERYTHING,
    KEEP_NAMES_ONLY,
    ZERO_BYTES,
    UNDO_REMOVALS,
    UNDO_REMOVALS_LOSE_BYTES,
)


def only_in(loss: Loss, *folders: str) -> Loss:
    """Restrict a loss to folders with these names; all other data had reached the disk."""
    names = set(folders)
    return replace(
        loss,
        name=f"{loss}-in-{'-'.join(folders)}",
        spares=lambda path: names.isdisjoint(path.parts),
    )


def sampled(seed: object) -> Loss:
    """Keep or lose each unsynced name and sector at random."""
    rng = random.Random(str(seed))

    def coin() -> bool:
        return rng.random() < 0.5

    def content(durable: bytes, data: bytes) -> bytes:
        if durable == data:
            return data
        kind = rng.randrange(6)
        if kind == 0:
            return durable
        if kind == 1:
            return data
        if kind == 2:
            return data[: rng.randint(min(len(durable), len(data)), len(data))]
        if kind == 3:
            return _zeroed(durable, data)
        return _sectors(rng, durable, data)

    return Loss(f"sampled-{seed}", coin, coin, content)


def _sectors(rng: random.Random, durable: bytes, data: bytes) -> bytes:
    """Return a mix of old and new sectors, with the old or the new length."""
    length = rng.choice((len(durable), len(data)))
    older, newer = durable.ljust(length, b"\0"), data.ljust(length, b"\0")
    parts = []
    for start in range(0, length, SECTOR):
        part = (older, newer)[rng.random() < 0.5][start : min(length, start + SECTOR)]
        parts.append(part)
    return b"".join(parts)


def after_power_loss(tree: Folder, loss: Loss) -> Tree:
    """Return what the disk holds after power loss."""
    found: Tree = {}
    _leave(tree, loss, Path(), found, {})
    return found


def _leave(folder: Folder, loss: Loss, path: Path, found: Tree, contents: dict[int, bytes]) -> None:
    for name in sorted({*folder.current, *folder.durable}):
        spared = loss.spares(path / name)
        current = folder.current.get(name)
        node = current if spared else _kept_node(current, folder.durable.get(name), loss)
        if node is None:
            continue
        if isinstance(node, Folder):
            found[path / name] = None
            _leave(node, loss, path / name, found, contents)
        else:
            if node.number not in contents:
                contents[node.number] = (
                    node.data if spared else loss.content(node.durable or b"", node.data)
                )
            found[path / name] = contents[node.number]


def _kept_node(current: Node | None, durable: Node | None, loss: Loss) -> Node | None:
    if current is None:
        return None if loss.keeps_removal() else durable
    if durable is None or current.number != durable.number:
        return current if loss.keeps_new() else durable
    return current


def write_tree(tree: Tree, folder: Path) -> None:
    """Write the content of a disk to a new folder."""
    folder.mkdir()
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)
