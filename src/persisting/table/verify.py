"""Verifies a table: compares its files with their checksums, and its rows with their order."""

from __future__ import annotations

from typing import Any

import msgspec

from persisting.errors import TableError
from persisting.lock import left_note
from persisting.table import checksums, files, repair, versions
from persisting.table.table import Table
from persisting.table.view import TableView


class Report(msgspec.Struct, kw_only=True):
    """What :func:`verify` found."""

    rows: int
    files: int
    damaged: list[dict[str, Any]]
    unchecked: list[str]

    @property
    def ok(self) -> bool:
        return not self.damaged

    def add(self, file: str, problem: str, offsets: list[int] | None = None) -> None:
        """Report a damaged file, and [first, after the last] offset that the damage concerns."""
        self.damaged.append({"file": file, "problem": problem, "offsets": offsets})


def verify(table: Table, view: TableView) -> Report:
    """Compare every file of the newest version, and of the tagged ones, with its checksum."""
    report = Report(rows=view.rows, files=0, damaged=[], unchecked=[])
    if view.dataset is None:
        return report
    views = views_in_use(table, view, report)
    file = files.manifest_path(table.root, view.version).relative_to(table.root)
    check_manifest(table, view, str(file), report)
    seen: set[str] = set()
    for checked in views:
        _check_files(table, checked, report, seen)
        if not report.damaged:  # else reading the rows would fail on the damage already found
            check_order(checked, report)
    return report


def check_signature(table: Table, report: Report) -> None:
    """Compare the newest manifest with the signature that the last owner left, if it left one."""
    try:
        repair.check_signature(table.root, left_note(table.root.parent))
    except TableError as exc:
        report.add(files.VERSIONS, str(exc))


def views_in_use(table: Table, view: TableView, report: Report) -> list[TableView]:
    """Return the newest version and the tagged ones; report a tag whose version cannot be read."""
    views = {view.version: view}
    for name, version in versions.tags(view.dataset).items():
        try:
            views.setdefault(version, table.at(version))
        except TableError as exc:
            report.add(f"tag {name}", str(exc))
    return list(views.values())


def check_manifest(table: Table, view: TableView, file: str, report: Report) -> None:
    """Compare the stored manifest with its content when it was read or written."""
    try:
        now = table.at(view.version)
    except TableError as exc:
        report.add(file, str(exc), [view.start, view.end])
        return
    if not _same_content(now, view):
        report.add(file, "differs from what was written", [view.start, view.end])


def _same_content(one: TableView, other: TableView) -> bool:
    return (
        (one.start, one.sizes) == (other.start, other.sizes)
        and one.schema.equals(other.schema)
        and [f.to_json() for f in one.fragments] == [f.to_json() for f in other.fragments]
    )


def _check_files(table: Table, view: TableView, report: Report, seen: set[str]) -> None:
    damaged, count, unchecked = checksums.check(table.root, view.dataset, seen)
    report.files += count
    report.unchecked += unchecked
    for file, problem in damaged:
        report.add(file, problem, _offsets_in(view, file))


def _offsets_in(view: TableView, file: str) -> list[int] | None:
    """[first, after the last] offset that a data file holds a part of; None for other files."""
    first = view.start
    for fragment, size in zip(view.fragments, view.sizes, strict=True):
        if any(f"{files.DATA}/{data.path}" == file for data in fragment.files):
            return [first, first + size.rows]
        first += size.rows
    return None


def check_order(view: TableView, report: Report) -> None:
    """Check that arrival times never fall from one row to the next."""
    try:
        offset = view.falling_arrival()
    except TableError as exc:
        report.add("data", str(exc))
        return
    if offset is not None:
        report.add("data", "rows are not in the order of their arrival", [offset, offset + 1])
