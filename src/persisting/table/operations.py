"""What is done to a table beside appending: each is one change that is durable when it returns.

The caller holds the table: nothing else is written to it meanwhile.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any

import msgspec

from persisting.errors import TableError
from persisting.fs import FileSystem
from persisting.lock import left_note
from persisting.table import checksums, compaction, files, indexes, properties, versions
from persisting.table.compaction import Limit
from persisting.table.indexes import IndexSpec
from persisting.table.lance_errors import translated
from persisting.table.properties import RESTORES, SEQUENCE, START, Restored, encode_restores
from persisting.table.table import Table
from persisting.table.view import TableView

log = logging.getLogger("persisting")

_MOST_PARTS = 8


def compact(
    table: Table,
    fs: FileSystem,
    count: int,
    limit: Limit,
    *,
    whole: bool = False,
    run: compaction.Run | None = None,
) -> None:
    """Rewrite the last ``count`` fragments as larger ones; no row moves.

    ``whole`` has every index cover all of them first, so that none stays apart for its sake.
    ``run`` has other processes write the files.
    """
    if compaction.split_by_indexes(table.view, count, limit, at_all=whole):
        optimize_indexes(table, whole=True)
    view = table.view

    def work(dataset: Any) -> None:
        compaction.rewrite(dataset, view, count, limit, table.root, fs, run)

    table.change("compact", work, several=True)
    table.note_checksums()


def drop_first(table: Table, count: int) -> int:
    """Drop the first ``count`` fragments; how many rows went. The offsets of the others stay."""
    from lance import LanceOperation

    view = table.view
    rows = sum(size.rows for size in view.sizes[:count])
    gone = [fragment.id for fragment in view.fragments[:count]]
    operation = LanceOperation.Delete([], gone, "true")
    table.commit("drop old rows of", operation, {START: str(view.start + rows)})
    return rows


def checkpoint(table: Table) -> None:
    """Have the newest version say everything of itself, whatever becomes of those before it."""
    from lance import LanceOperation

    view = table.view
    assert view.dataset is not None
    with translated("read a transaction of", table.root):
        told = properties.own(view.dataset, view.version)
    if told is None:
        kept = {k: v for k, v in table.properties.items() if k.startswith("persisting.")}
        entries = LanceOperation.UpdateMap(updates=dict(kept), replace=False)
        table.commit("checkpoint", LanceOperation.UpdateConfig(config_updates=entries), {})


def restore(table: Table, version: int, token: str) -> TableView:
    """Make the content of ``version`` the newest one."""
    from lance import LanceOperation

    target = table.at(version)
    then = {} if target.dataset is None else properties.read(target.dataset)
    # Rows that other restores took away since then come back: they part from those of now where
    # the first of these restores ended.
    since = table.restores[len(properties.restores_of(then)) :]
    parting = min([target.end, *(one.end for one in since)])
    restores = [*table.restores, Restored(parting, token)]
    changed = {
        **then,
        # The log has gone on since then: what it held up to now must not come again.
        SEQUENCE: str(table.sequence),
        START: str(target.start),
        RESTORES: encode_restores(restores),
    }
    operation: Any = LanceOperation.Restore(version)
    if version == versions.NOTHING:
        gone = [fragment.id for fragment in table.view.fragments]
        operation = LanceOperation.Delete([], gone, "true")
    table.commit("restore", operation, changed, only=True)
    if table.view.rows != target.rows:
        raise TableError(
            f"{table.root} has {table.view.rows} rows after a restore to {target.rows}"
        )
    # The version may be one between an index and its checksums. The restore is done in any case;
    # what fails here is left to the next owner.
    with suppress(TableError):
        table.vouch()
    return table.view


def tag(table: Table, fs: FileSystem, name: str) -> int:
    """Pin the newest version under a name; the version."""
    checkpoint(table)
    view = table.view
    assert view.dataset is not None
    with translated("tag", table.root):
        files.write_tag(fs, table.root, name, view.version)
    return view.version


def delete_tag(table: Table, fs: FileSystem, name: str) -> bool:
    """Whether there was such a tag; it is gone."""
    dataset = table.view.dataset
    if dataset is None or name not in versions.tags(dataset):
        return False
    with translated("remove a tag of", table.root):
        files.remove_tag(fs, table.root, name)
    return True


def clean(table: Table, keep_seconds: float) -> int:
    """Remove versions that are older and not tagged; how many."""
    with translated("clean up", table.root):
        going = versions.outdated(table.view.dataset, keep_seconds)
    if going:
        checkpoint(table)
        with translated("clean up", table.root):
            files.announce_cleaning(table.fs, table.root, going)
            versions.remove(table.view.dataset, going)
            files.finish_cleaning(table.fs, table.root)
    return len(going)


def build_indexes(table: Table, wanted: list[IndexSpec]) -> list[str]:
    """Build the indexes that the table lacks, drop those that nobody wants; the names built."""
    done = []
    for one in indexes.missing(table.view.dataset, wanted, table.view.rows):
        table.change(
            "index", partial(indexes.build, wanted=one, rows=table.view.rows), several=True
        )
        done.append(one.name)
    for name in indexes.unwanted(table.view.dataset, wanted):
        table.change("drop an index of", methodcaller("drop_index", name))
    table.note_checksums()
    return done


def optimize_indexes(table: Table, *, whole: bool = False) -> None:
    """Have every index cover every row; ``whole`` also makes one part of each.

    New rows become a part of their own, which costs little; many parts slow a search down.
    """
    parts = max(
        (len(one.segments) for one in indexes.built(table.view.dataset).values()), default=0
    )
    merged = {"num_indices_to_merge": parts} if whole or parts > _MOST_PARTS else {}
    table.change("index", lambda dataset: dataset.optimize.optimize_indices(**merged), several=True)
    table.note_checksums()


class Report(msgspec.Struct, kw_only=True):
    """What :func:`verify` found."""

    rows: int
    files: int
    damaged: list[dict[str, Any]]
    unchecked: list[str]

    @property
    def ok(self) -> bool:
        return not self.damaged


def verify(table: Table, view: TableView) -> Report:
    """Compare every file of the newest version, and of the tagged ones, with its checksum."""
    report = Report(rows=view.rows, files=0, damaged=[], unchecked=[])
    if view.dataset is None:
        return report
    views = {view.version: view}
    for name, version in versions.tags(view.dataset).items():
        try:
            views.setdefault(version, table.at(version))
        except TableError as exc:
            report.damaged.append({"file": f"tag {name}", "problem": str(exc), "offsets": None})
    _check_manifest(table, view, report)
    seen: set[str] = set()
    for one in views.values():
        _check_files(table, one, report, seen)
        if not report.damaged:  # else Lance would trip over what is known by now
            _check_order(one, report)
    return report


def check_left(table: Table, report: Report) -> None:
    """Compare the newest manifest with what the last owner left, if it left cleanly."""
    try:
        table.check_signature(left_note(table.root.parent))
    except TableError as exc:
        report.damaged.append({"file": files.VERSIONS, "problem": str(exc), "offsets": None})


def _check_manifest(table: Table, view: TableView, report: Report) -> None:
    """Compare the manifest on disk with what it said when it was read or written."""
    file = str(files.manifest_path(table.root, view.version).relative_to(table.root))
    try:
        now = table.at(view.version)
        same = (now.start, now.sizes) == (view.start, view.sizes) and now.schema.equals(view.schema)
        problem = None if same else "says something else than it did"
        if [f.to_json() for f in now.fragments] != [f.to_json() for f in view.fragments]:
            problem = "says something else than it did"
    except TableError as exc:
        problem = str(exc)
    if problem is not None:
        report.damaged.append({"file": file, "problem": problem, "offsets": [view.start, view.end]})


def _check_files(table: Table, view: TableView, report: Report, seen: set[str]) -> None:
    damaged, count, unchecked = checksums.check(table.root, view.dataset, seen)
    report.files += count
    report.unchecked += unchecked
    for file, problem in damaged:
        report.damaged.append(
            {"file": file, "problem": problem, "offsets": _offsets_in(view, file)}
        )


def _offsets_in(view: TableView, file: str) -> list[int] | None:
    """[first, after the last] offset that a data file holds a part of; None for other files."""
    first = view.start
    for fragment, size in zip(view.fragments, view.sizes, strict=True):
        if any(f"{files.DATA}/{one.path}" == file for one in fragment.files):
            return [first, first + size.rows]
        first += size.rows
    return None


def _check_order(view: TableView, report: Report) -> None:
    """Times of arrival never fall from one row to the next."""
    try:
        place = view.falling_arrival()
    except TableError as exc:
        report.damaged.append({"file": "data", "problem": str(exc), "offsets": None})
        return
    if place is not None:
        report.damaged.append(
            {
                "file": "data",
                "problem": "rows are not in the order of their arrival",
                "offsets": [place, place + 1],
            }
        )
