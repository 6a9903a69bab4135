"""Data files that no version of a table names: left by writers that failed or died.

Files are only removed if no version on disk names them. Recent ones stay: a running write may still
hand them over.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from persisting.errors import TableError
from persisting.table import files
from persisting.table.table import Table


def remove_unused(table: Table, names: Collection[str]) -> int:
    """Remove those of the data files that no version names; return how many."""
    return remove(table, unused(table, names))


def unused(table: Table, names: Collection[str]) -> set[str]:
    """Return those of the data files that are on disk, and that no version names."""
    left = set(names) & files.data_on_disk(table.root)
    return left - _named(table) if left else left


def old_and_unused(table: Table, seconds: float) -> set[str]:
    """Return the files older than ``seconds`` that no version names. Needs no lock, and may read
    many versions."""
    now = time.time()
    old = set()
    for name in files.data_on_disk(table.root).difference(files.data_paths(table.view.fragments)):
        with suppress(FileNotFoundError):
            if now - (table.root / files.DATA / name).stat().st_mtime > seconds:
                old.add(name)
    return unused(table, old)


def remove(table: Table, names: Collection[str]) -> int:
    """Remove unused data files, except those that the newest version now names; return how many.

    The caller holds the table.
    """
    left = set(names).difference(files.data_paths(table.view.fragments))
    for name in left:
        table.fs.remove(table.root / files.DATA / name)
    return len(left)


def _named(table: Table) -> set[str]:
    """Return the data files that any version on disk names; raise if a version cannot be read."""
    named: set[str] = set()
    for version in files.versions_on_disk(table.root):
        try:
            view = table.at(version)
        except TableError:
            if files.manifest_path(table.root, version).exists():
                raise
            continue  # its owner has just cleaned it up
        if view.dataset is not None:
            named.update(files.data_paths(view.fragments))
    return named
