"""The files under a Lance table: synced in the right order, checked at open.

Lance writes a data file, then a transaction, then links a manifest, and syncs none of them. A
commit is durable only when all three and their folders were synced, data first. What a crash can
leave behind is a newest manifest that is empty, cut or full of zeros; every older one was synced
before the next was begun.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from persisting import json_files
from persisting.errors import TableError
from persisting.fs import FileSystem

log = logging.getLogger("persisting")

DATA = "data"
VERSIONS = "_versions"
TRANSACTIONS = "_transactions"
INDICES = "_indices"
TAGS = "_refs/tags"
ASIDE = "damaged"
CHANGING = "changing"
CLEANING = "cleaning"
_LAST_VERSION = 2**64 - 1
_END = b"LANC"
"""How every file ends that Lance writes, but for its transactions."""


def manifest_path(root: Path, version: int) -> Path:
    return root / VERSIONS / f"{_LAST_VERSION - version:020d}.manifest"


def versions_on_disk(root: Path) -> list[int]:
    """The versions that have a manifest, oldest first."""
    folder = root / VERSIONS
    if not folder.is_dir():
        return []
    return sorted(
        _LAST_VERSION - int(name[: -len(".manifest")])
        for name in os.listdir(folder)
        if name.endswith(".manifest") and name[: -len(".manifest")].isdigit()
    )


def newest_version(root: Path) -> int:
    """The version of the newest manifest on disk, 0 if there is none."""
    return max(versions_on_disk(root), default=0)


def data_paths(fragments: Iterable[Any]) -> list[str]:
    """The data files of fragments (their metadata objects)."""
    return [file.path for fragment in fragments for file in fragment.files]


def sync_data(fs: FileSystem, root: Path, names: Iterable[str]) -> None:
    """Sync data files before a manifest may name them."""
    for name in names:
        fs.sync_file(root / DATA / name)
    fs.sync_folder(root / DATA)


def sync_version(fs: FileSystem, root: Path, version: int, uuid: str | None = None) -> None:
    """Sync a manifest with the transaction it came from, and their folders."""
    transactions = root / TRANSACTIONS
    if uuid is not None:
        fs.sync_file(transactions / f"{version - 1}-{uuid}.txn")
        fs.sync_folder(transactions)
    elif transactions.is_dir():
        for name in os.listdir(transactions):
            if name.startswith(f"{version - 1}-") and name.endswith(".txn"):
                fs.sync_file(transactions / name)
        fs.sync_folder(transactions)
    fs.sync_file(manifest_path(root, version))
    fs.sync_folder(root / VERSIONS)


def sync_indices(fs: FileSystem, root: Path, names: Iterable[str]) -> None:
    """Sync the folders of indexes, with all that is in them."""
    for name in names:
        for place, _, found in os.walk(root / INDICES / name):
            for file in found:
                fs.sync_file(Path(place) / file)
            fs.sync_folder(Path(place))
        fs.sync_folder(root / INDICES)
        fs.sync_folder(root)


def write_tag(fs: FileSystem, root: Path, name: str, version: int) -> None:
    """Put a tag in place, as Lance keeps it. By us, since Lance does not sync it: a torn file
    among the tags makes all of them unreadable."""
    size = manifest_path(root, version).stat().st_size
    now = dt.datetime.now(dt.timezone.utc).isoformat()
    tag: dict[str, Any] = {
        "branch": None,
        "version": version,
        "createdAt": now,
        "updatedAt": now,
        "manifestSize": size,
        "metadata": {},
    }
    fs.make_folder(root / TAGS)
    fs.write_file(root / TAGS / f"{name}.json", msgspec.json.encode(tag))
    for folder in ((root / TAGS).parent, root):  # who made them may have died before the sync
        fs.sync_folder(folder)


def remove_tag(fs: FileSystem, root: Path, name: str) -> None:
    fs.remove(root / TAGS / f"{name}.json")
    fs.sync_folder(root / TAGS)


def announce_cleaning(fs: FileSystem, root: Path, going: list[int]) -> None:
    """Say, durably, which versions are being removed: power loss may bring a manifest back whose
    data is gone."""
    fs.write_file(root.parent / CLEANING, msgspec.json.encode(going))


def finish_cleaning(fs: FileSystem, root: Path) -> None:
    """Remove what is left of versions that were being removed, and make all of it durable."""
    path = root.parent / CLEANING
    try:
        going = json_files.decode(fs.read(path), list[int])
    except FileNotFoundError:
        return
    except msgspec.DecodeError:
        going = []
    for version in going:
        fs.remove(manifest_path(root, version))
    fs.sync_folder(root / VERSIONS)
    fs.remove(path)


def sync_root(fs: FileSystem, root: Path) -> None:
    """Sync the entries of a table that was just created."""
    fs.sync_folder(root)
    fs.sync_folder(root.parent)


def check_whole(path: Path, size: int | None = None) -> None:
    """Raise where a file that was just written is not whole.

    Lance does not look whether its last write to a file succeeded: on a full or failing disk it
    goes on with a file that is cut.
    """
    try:
        with path.open("rb") as file:
            found = file.seek(0, os.SEEK_END)
            file.seek(max(0, found - len(_END)))
            end = file.read()
    except FileNotFoundError:
        found, end = 0, b""
    if end != _END or (size is not None and found != size):
        raise TableError(
            f"{path} could not be written to its end ({found} bytes are there): the disk is full "
            "or fails; nothing was committed"
        )


def check_indices(root: Path, names: Iterable[str]) -> None:
    """Raise where a file of these indexes is not whole."""
    for name in names:
        for place, _, found in os.walk(root / INDICES / name):
            for file in found:
                check_whole(Path(place) / file)


def check_data(root: Path, fragments: Iterable[Any]) -> None:
    """Raise where a data file is missing or shorter than its manifest says."""
    for fragment in fragments:
        for file in fragment.files:
            path = root / DATA / file.path
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise TableError(f"data file {path} is missing") from None
            if file.file_size_bytes is not None and size != file.file_size_bytes:
                raise TableError(
                    f"data file {path} has {size} bytes, its manifest says {file.file_size_bytes}"
                )


def set_manifest_aside(fs: FileSystem, root: Path, version: int, why: object) -> None:
    """Take a broken newest manifest out of the table, keeping a copy."""
    source = manifest_path(root, version)
    folder = root.parent / ASIDE
    fs.make_folder(folder)
    kept = folder / f"version-{version}-{os.getpid()}.manifest"
    fs.rename(source, kept)
    fs.sync_folder(root / VERSIONS)
    fs.sync_folder(folder)
    log.warning(
        "table %s: version %d was torn by a crash (%s); went back to the version before it, "
        "the manifest is kept as %s",
        root,
        version,
        why,
        kept,
    )


def announce_change(fs: FileSystem, root: Path, version: int) -> None:
    """Say, durably, that all versions above ``version`` may be torn until the change is done."""
    fs.write_file(root.parent / CHANGING, str(version).encode())


def change_done(fs: FileSystem, root: Path) -> None:
    """The versions of the change are synced. If this is forgotten by a crash no harm is done:
    a version that can be read is never stepped over."""
    fs.remove(root.parent / CHANGING)


def changing_since(root: Path, fs: FileSystem) -> int:
    """The version above which all may be torn."""
    try:
        text = fs.read(root.parent / CHANGING).decode(errors="replace")
    except FileNotFoundError:
        return _LAST_VERSION
    return int(text) if text.isdigit() else _LAST_VERSION


def data_on_disk(root: Path) -> set[str]:
    """The names of all data files, whoever uses them."""
    folder = root / DATA
    return set(os.listdir(folder)) if folder.is_dir() else set()


def remove_new_data(fs: FileSystem, root: Path, before: set[str]) -> None:
    """After a failed write, remove the data files that were not there ``before``.

    What cannot be removed is harmless. By name and not by time: a file of an older version may be
    a moment old, and a tag may hold it.
    """
    for name in data_on_disk(root) - before:
        try:
            fs.remove(root / DATA / name)
        except OSError as exc:
            log.warning("cannot remove %s, left by a failed write: %s", root / DATA / name, exc)
