"""The files of a Lance table: syncs them in the right order, checks and removes them.

Lance writes a data file, then a transaction, then links a manifest, and syncs none of them. A
commit is durable only when all three and their folders are synced, data first. A crash can leave a
newest manifest that is empty, truncated or full of zeros; every older one was synced before the
next commit began.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from persisting import json_files
from persisting.errors import TableError
from persisting.fs import FileSystem

log = logging.getLogger("persisting")

DATA = "data"
HANDED = "handed-"
"""The beginning of the names of data files that other processes write for the owner to commit."""
VERSIONS = "_versions"
TRANSACTIONS = "_transactions"
INDICES = "_indices"
TAGS = "_refs/tags"
ASIDE = "damaged"
CHANGING = "changing"
CLEANING = "cleaning"
_LAST_VERSION = 2**64 - 1
_END = b"LANC"
"""The last bytes of every file that Lance writes, except transactions."""


def manifest_path(root: Path, version: int) -> Path:
    return root / manifest_name(version)


def manifest_name(version: int) -> str:
    """Return the name of a manifest within its table."""
    return f"{VERSIONS}/{_LAST_VERSION - version:020d}.manifest"


def version_of(name: str) -> int | None:
    """Return the version whose manifest has this name, None for another file."""
    number = name.removesuffix(".manifest")
    return _LAST_VERSION - int(number) if number != name and number.isdigit() else None


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


class Manifest(NamedTuple):
    """A manifest on disk: the file that has the name of a version."""

    version: int
    inode: int = 0
    modified: int = 0


NO_MANIFEST = Manifest(0)


def newest_manifest(root: Path) -> Manifest:
    """The newest manifest on disk, :data:`NO_MANIFEST` if there is none."""
    while version := newest_version(root):
        with suppress(FileNotFoundError):  # it was just rolled back
            return manifest_at(root, version)
    return NO_MANIFEST


def manifest_at(root: Path, version: int) -> Manifest:
    """The manifest of a version; raises ``FileNotFoundError`` if there is none."""
    found = manifest_path(root, version).stat()
    return Manifest(version, found.st_ino, found.st_mtime_ns)


def data_paths(fragments: Iterable[Any]) -> list[str]:
    """The data files of fragments (their metadata objects)."""
    return [file.path for fragment in fragments for file in fragment.files]


def sync_data(fs: FileSystem, root: Path, names: Iterable[str]) -> None:
    """Sync data files; this must happen before a manifest names them."""
    for name in names:
        fs.sync_file(root / DATA / name)
    fs.sync_folder(root / DATA)


def sync_version(fs: FileSystem, root: Path, version: int, uuid: str | None = None) -> None:
    """Sync a manifest, its transaction and their folders."""
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
    """Sync the folders of indexes and their content."""
    for name in names:
        for folder, _, entries in os.walk(root / INDICES / name):
            for entry in entries:
                fs.sync_file(Path(folder) / entry)
            fs.sync_folder(Path(folder))
        fs.sync_folder(root / INDICES)
        fs.sync_folder(root)


def write_tag(fs: FileSystem, root: Path, name: str, version: int) -> None:
    """Write a tag in Lance's format.

    Lance itself would not sync it, and one torn file makes all tags unreadable.
    """
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
    for folder in ((root / TAGS).parent, root):  # their creator may have died before it synced
        fs.sync_folder(folder)


def sync_tags(fs: FileSystem, root: Path) -> None:
    """Sync which tags there are; their files are synced before they get their names."""
    tags = root / TAGS
    if tags.is_dir():
        fs.sync_folder(tags)
        fs.sync_folder(tags.parent)


def remove_tag(fs: FileSystem, root: Path, name: str) -> None:
    fs.remove(root / TAGS / f"{name}.json")
    fs.sync_folder(root / TAGS)


def announce_cleaning(fs: FileSystem, root: Path, going: list[int]) -> None:
    """Record durably which versions are being removed: power loss may bring a manifest back whose
    data was removed."""
    fs.write_file(root.parent / CLEANING, msgspec.json.encode(going))


def finish_cleaning(fs: FileSystem, root: Path) -> None:
    """Remove the remaining manifests of an announced cleaning, and make their removal durable."""
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
    """Sync the entries of a newly created table."""
    fs.sync_folder(root)
    fs.sync_folder(root.parent)


def check_whole(path: Path, size: int | None = None) -> None:
    """Raise if a newly written file is incomplete.

    Lance does not check whether its last write to a file succeeded: on a full or failing disk it
    continues with a truncated file.
    """
    try:
        with path.open("rb") as file:
            actual = file.seek(0, os.SEEK_END)
            file.seek(max(0, actual - len(_END)))
            end = file.read()
    except FileNotFoundError:
        actual, end = 0, b""
    if end != _END or (size is not None and actual != size):
        raise TableError(
            f"{path} is incomplete ({actual} bytes were written): the disk is full or failing; "
            "nothing was committed"
        )


def check_indices(root: Path, names: Iterable[str]) -> None:
    """Raise if a newly written file of these indexes is incomplete."""
    for name in names:
        for folder, _, entries in os.walk(root / INDICES / name):
            for entry in entries:
                check_whole(Path(folder) / entry)


def check_data(root: Path, fragments: Iterable[Any]) -> None:
    """Raise if a data file is missing or does not have the size in its manifest."""
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
    """Move a torn manifest out of the table, into the folder ``damaged``."""
    source = manifest_path(root, version)
    folder = root.parent / ASIDE
    fs.make_folder(folder)
    kept = folder / f"version-{version}-{os.getpid()}.manifest"
    fs.rename(source, kept)
    fs.sync_folder(root / VERSIONS)
    fs.sync_folder(folder)
    log.warning(
        "table %s: version %d was torn by a crash (%s); went back to the version before it; "
        "the manifest is kept as %s",
        root,
        version,
        why,
        kept,
    )


def announce_change(fs: FileSystem, root: Path, version: int) -> None:
    """Record durably that versions above ``version`` may be torn until the change is done."""
    fs.write_file(root.parent / CHANGING, str(version).encode())


def change_done(fs: FileSystem, root: Path) -> None:
    """Remove the announcement: the versions of the change are synced.

    If a crash prevents that, no harm is done: a version that can be read is never skipped.
    """
    fs.remove(root.parent / CHANGING)


def changing_since(root: Path, fs: FileSystem) -> int:
    """The version above which any may be torn, because a change was announced."""
    try:
        text = fs.read(root.parent / CHANGING).decode(errors="replace")
    except FileNotFoundError:
        return _LAST_VERSION
    return int(text) if text.isdigit() else _LAST_VERSION


def data_on_disk(root: Path) -> set[str]:
    """The names of all data files on disk, used by a version or not."""
    folder = root / DATA
    return set(os.listdir(folder)) if folder.is_dir() else set()


def remove_new_data(fs: FileSystem, root: Path, before: set[str]) -> None:
    """After a failed write, remove the data files that are not in ``before``.

    A file that cannot be removed is harmless. Files are compared by name and not by time: a recent
    file may belong to an older version, which a tag may hold. Files that other processes have
    written meanwhile are theirs.
    """
    for name in data_on_disk(root) - before:
        if name.startswith(HANDED):
            continue
        try:
            fs.remove(root / DATA / name)
        except OSError as exc:
            log.warning("cannot remove %s, left by a failed write: %s", root / DATA / name, exc)
