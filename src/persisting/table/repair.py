"""Opens the newest whole version of a table, and repairs what a crash left behind.

Every version is synced before the next one is begun, so a crash can tear only the newest one. The
exception is a change in which Lance commits several versions; such a change is announced in a file
beforehand (:func:`files.announce_change`), and any of its versions may be torn.

A torn version was never acknowledged: it is set aside, and the version before it is opened. The
same breakage in a version that is known to have been durable is damage, and raises. Two records
prove that a manifest was durable: the signature that an owner leaves in the lock file when it
closes cleanly, and the ``newest`` file that is written after every commit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from persisting.errors import TableError
from persisting.fs import FileSystem
from persisting.table import checksums, files, layout, properties
from persisting.table.lance_errors import lance_errors_as, translated

NEWEST = "newest"
SIGNATURE = ("version", "manifest")
"""The keys of :func:`signature`."""


class TornVersion(TableError):
    """A version cannot be read, in the way that a crash during its commit leaves it."""


def load(root: Path, version: int, cache_bytes: int | None = None) -> Any:
    """A handle of one version; raises :class:`TornVersion` if its manifest cannot be read.

    It keeps at most ``cache_bytes`` of indexes in memory, and as many of metadata.
    """
    import lance

    with lance_errors_as(lambda exc: _open_error(exc, root)):
        dataset = lance.dataset(
            str(root),
            version=version,
            index_cache_size_bytes=cache_bytes,
            metadata_cache_size_bytes=cache_bytes,
        )
        if dataset.version != version:
            raise TornVersion(f"the manifest of version {version} of {root} is damaged")
        try:
            schema = layout.logical_schema(dataset.schema, root)
        except layout.UnreadableSchema as exc:
            raise TornVersion(str(exc)) from exc
        if not layout.has_columns_of(dataset.schema, schema):
            raise TornVersion(f"version {version} of {root} lacks columns of its own schema")
        return dataset


def load_newest(root: Path, fs: FileSystem, version: int, *, left_clean: bool) -> Any | None:
    """A handle of the newest whole version at or below ``version``, the newest on disk.

    Torn versions above it are set aside. Returns None if no version is left.
    """
    _check_newest_note(root, fs, version)
    try:
        dataset = _load_whole(root, version)
    except TornVersion as exc:
        dataset = _step_back(root, fs, version, left_clean, exc)
    if dataset is not None:
        _set_torn_aside(root, fs, dataset.version)
    return dataset


def sync_all(root: Path, fs: FileSystem, dataset: Any) -> None:
    """Sync everything that a version refers to, and the tags: their writer may have died before it
    did, and what can be read now must stay."""
    with translated("sync", root):
        fs.make_folder(root / files.DATA)  # a copied table without rows has no such folder
        fragments = (f.metadata for f in dataset.get_fragments())
        files.sync_data(fs, root, files.data_paths(fragments))
        floor = files.changing_since(root, fs)
        for version in files.versions_on_disk(root):
            if version > floor or version == dataset.version:
                files.sync_version(fs, root, version)
        files.sync_tags(fs, root)
        files.sync_root(fs, root)


def remove_drafts(root: Path, fs: FileSystem) -> None:
    """Remove the drafts of small files that a crash left. The caller holds the bucket's lock."""
    for folder in (root.parent, root / files.TAGS):
        with suppress(OSError):  # drafts are harmless
            fs.remove_drafts(folder)


def signature(root: Path, version: int) -> dict[str, Any]:
    """The version and the checksum of its manifest, for the next owner."""
    crc = checksums.crc_of(files.manifest_path(root, version))
    return dict(zip(SIGNATURE, (version, crc), strict=True))


def check_signature(root: Path, left: Mapping[str, Any]) -> None:
    """Raise if the newest manifest is not the one of the signature that the last owner ``left``."""
    version, crc = (left.get(key) for key in SIGNATURE)
    if not isinstance(version, int) or not 0 < version >= files.newest_version(root):
        return  # no signature, or another tool has committed since
    path = files.manifest_path(root, version)
    if not path.exists() or checksums.crc_of(path) != crc:
        raise TableError(
            f"the manifest {path} is not the one that was written: it is damaged. Restore "
            f"{root} from a copy"
        )


def note_newest(root: Path, fs: FileSystem, version: int) -> None:
    """Record, without a sync, that the manifest of ``version`` is durable.

    The note survives a kill, and may or may not survive power loss. If it does, a broken manifest
    is damage and not a torn write. A missing or old note does no harm, so errors are ignored.
    """
    with suppress(OSError):
        note = f"{version} {checksums.crc_of(files.manifest_path(root, version))}"
        fs.write_note(root.parent / NEWEST, f"{note} {_seal(note)}".encode())


def forget_newest(root: Path, fs: FileSystem) -> None:
    """Remove the note: the version that it names is about to be rolled back."""
    fs.remove(root.parent / NEWEST)


def _check_newest_note(root: Path, fs: FileSystem, version: int) -> None:
    """Raise if the manifest of ``version`` was durable once and has changed since."""
    try:
        note = fs.read(root.parent / NEWEST).decode(errors="replace").split()
    except FileNotFoundError:
        return
    intact = len(note) == 3 and note[2] == _seal(f"{note[0]} {note[1]}")
    if intact and note[0] == str(version):
        check_signature(root, dict(zip(SIGNATURE, (version, note[1]), strict=True)))


def _load_whole(root: Path, version: int) -> Any:
    """A handle of a version whose data files are complete, or :class:`TornVersion`.

    An append syncs its data before its manifest exists, so a bad data file of an append is damage.
    """
    dataset = load(root, version)
    with lance_errors_as(lambda exc: _open_error(exc, root)):
        own_properties = properties.own(dataset, version)
    try:
        files.check_data(root, (f.metadata for f in dataset.get_fragments()))
    except TableError as exc:
        if own_properties is not None:
            raise
        raise TornVersion(str(exc)) from exc
    return dataset


def _step_back(
    root: Path, fs: FileSystem, version: int, left_clean: bool, why: TornVersion
) -> Any | None:
    """Set the torn version aside and return the newest whole one below it, None if none is left."""
    if left_clean:
        raise TableError(
            f"{why}. The bucket had been closed cleanly, so this is damage to stored data, not "
            f"a torn write; restore {root} from a copy"
        ) from why
    floor = min(files.changing_since(root, fs), version - 1)
    torn = [(version, why)]
    while True:
        older = _next_older(root, torn[-1][0])
        try:
            dataset = _load_whole(root, older) if older else None
            break
        except TornVersion as exc:
            if older <= floor:
                raise
            torn.append((older, exc))
    forget_newest(root, fs)
    for number, error in torn:
        files.set_manifest_aside(fs, root, number, error)
    return dataset


def _set_torn_aside(root: Path, fs: FileSystem, version: int) -> None:
    """Set torn versions below ``version`` aside, which an announced change may have left."""
    floor = files.changing_since(root, fs)
    for older in files.versions_on_disk(root):
        if floor < older < version:
            try:
                _load_whole(root, older)
            except TornVersion as exc:
                files.set_manifest_aside(fs, root, older, exc)


def _next_older(root: Path, version: int) -> int:
    older = (number for number in files.versions_on_disk(root) if number < version)
    return max(older, default=0)


def _open_error(exc: BaseException, root: Path) -> TableError:
    """An error of the operating system says nothing about the manifest; any other means that the
    manifest cannot be read."""
    text = str(exc)
    if "os error" in text and "No such file" not in text:
        return TableError(f"cannot open the table {root}: {text}; nothing was changed")
    return TornVersion(f"the newest manifest of {root} cannot be read: {text}")


def _seal(note: str) -> str:
    return f"{zlib.crc32(note.encode()):08x}"
