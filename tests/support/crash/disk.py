"""A disk that remembers what was synced, and what power loss may leave of the rest.

The model is the strict reading of POSIX. A file's bytes are durable as they stood at its last sync;
a name is durable when its folder was synced after the name had appeared, changed or gone. Whatever
is younger may be kept or lost, each name on its own, each sector of a file on its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

SECTOR = 512
SYNCED_BY_ITSELF = {".lock"}
"""Files that are written and synced past the seam, in one step."""


@dataclass(frozen=True)
class File:
    """A file at one moment: its bytes, and those it had when it was last synced."""

    number: int
    data: bytes
    durable: bytes | None


@dataclass(frozen=True)
class Folder:
    """A folder at one moment: its entries, and those it had when it was last synced."""

    number: int
    current: dict[str, Node]
    durable: dict[str, Node]


Node: TypeAlias = "File | Folder"
Tree: TypeAlias = "dict[Path, bytes | None]"
"""What a disk holds: the bytes of files, None for folders."""


class _LiveFile:
    def __init__(self, number: int) -> None:
        self.number, self.data, self.durable = number, b"", None


class _LiveFolder:
    def __init__(self, number: int) -> None:
        self.number = number
        self.current: dict[str, _LiveFile | _LiveFolder] = {}
        self.durable: dict[str, _LiveFile | _LiveFolder] = {}


class Disk:
    """Follows a folder on the real disk. Not safe between threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._numbers = iter(range(1, 1 << 62))
        self._top = _LiveFolder(0)
        self.observe()
        self._sync_everything(self._top)

    def observe(self) -> bool:
        """Take in what changed on the real disk since the last look; whether anything did."""
        return self._observe(self.root, self._top)

    def replaced(self, path: Path) -> None:
        """The name stands for another file than before, though it may look the same."""
        folder = self._find(path.parent)
        if isinstance(folder, _LiveFolder):
            folder.current.pop(path.name, None)

    def moved(self, old: Path, new: Path) -> None:
        """A file has a new name, and is as durable as it was."""
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
        """Whether power loss leaves a file or folder, with all that is in it now."""
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
            found = {entry.name: entry.is_dir() for entry in os.scandir(path)}
        except FileNotFoundError:  # gone since it was listed; the next look sees it
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
                changed |= self._look_into(path / name, known)
        return changed

    def _look_into(self, path: Path, file: _LiveFile) -> bool:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # gone since it was listed; the next look sees it
            return False
        changed = data != file.data
        file.data = data
        if path.name in SYNCED_BY_ITSELF:
            file.durable = data
        return changed

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
    """One way for the power to go: which young names are kept, and what of young bytes."""

    name: str
    keeps_new: Callable[[], bool]
    keeps_removal: Callable[[], bool]
    content: Callable[[bytes, bytes], bytes]
    """(durable bytes, bytes at the moment) to what is found afterwards."""
    spares: Callable[[Path], bool] = lambda _: False
    """Paths that are found as they were at the moment, whatever the rest says."""

    def __str__(self) -> str:
        return self.name


def _zeroed(durable: bytes, data: bytes) -> bytes:
    return durable + bytes(max(0, len(data) - len(durable)))


NOTHING = Loss("nothing-unsynced", lambda: False, lambda: False, lambda durable, _: durable)
EVERYTHING = Loss("everything", lambda: True, lambda: True, lambda _, data: data)
NAMES = Loss("names-without-bytes", lambda: True, lambda: True, lambda durable, _: durable)
ZEROS = Loss("names-with-zeros", lambda: True, lambda: True, _zeroed)
COME_BACK = Loss("removals-undone", lambda: True, lambda: False, lambda _, data: data)
COME_BACK_TORN = Loss("removals-undone-bytes-lost", lambda: True, lambda: False, lambda d, _: d)
FIXED = (NOTHING, EVERYTHING, NAMES, ZEROS, COME_BACK, COME_BACK_TORN)


def only_in(loss: Loss, *folders: str) -> Loss:
    """The loss strikes what lies in folders of these names; all else was written back in time."""
    wanted = set(folders)
    return replace(
        loss,
        name=f"{loss}-in-{'-'.join(folders)}",
        spares=lambda path: wanted.isdisjoint(path.parts),
    )


def sampled(seed: object) -> Loss:
    """Each young name and each young sector by the toss of a coin."""
    rng = random.Random(str(seed))

    def toss() -> bool:
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

    return Loss(f"sampled-{seed}", toss, toss, content)


def _sectors(rng: random.Random, durable: bytes, data: bytes) -> bytes:
    """Some sectors old, some new, at the old or the new length."""
    length = rng.choice((len(durable), len(data)))
    older, newer = durable.ljust(length, b"\0"), data.ljust(length, b"\0")
    parts = []
    for start in range(0, length, SECTOR):
        part = (older, newer)[rng.random() < 0.5][start : min(length, start + SECTOR)]
        parts.append(part)
    return b"".join(parts)


def after_power_loss(tree: Folder, loss: Loss) -> Tree:
    """What is found on the disk when the power is back."""
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


def lay_out(tree: Tree, folder: Path) -> None:
    """Write a disk's content into an empty folder."""
    folder.mkdir()
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def lay_over(tree: Tree, folder: Path) -> None:
    """Make an existing folder hold a disk's content, touching only what differs."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.relative_to(folder) not in tree:
            path.rmdir() if path.is_dir() else path.unlink()
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir(exist_ok=True)
        elif not (folder / path).exists() or (folder / path).read_bytes() != data:
            (folder / path).write_bytes(data)
