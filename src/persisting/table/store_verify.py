"""Verifies a table in an object store.

The store keeps checksums of its objects, and tables there have none of our own. So this checks that
every object is there with the size that the manifest says, that every row can be decoded, and that
rows are in the order of their arrival.
"""

from __future__ import annotations

from persisting.errors import TableError
from persisting.table import files
from persisting.table.lance_errors import indices_of
from persisting.table.store_table import StoreTable
from persisting.table.verify import Report, check_manifest, check_order, views_in_use
from persisting.table.view import TableView


def verify(table: StoreTable, view: TableView) -> Report:
    """Check every object of the newest version, and of the tagged ones."""
    report = Report(rows=view.rows, files=0, damaged=[], unchecked=[])
    if view.dataset is None:
        return report
    views = views_in_use(table, view, report)
    check_manifest(table, view, files.manifest_name(view.version), report)
    sizes = table.committer.object_sizes(files.DATA)
    indexes = table.committer.object_sizes(files.INDICES)
    seen: set[str] = set()
    for checked in views:
        before = len(report.damaged)
        _check_data(checked, sizes, report, seen)
        _check_indexes(checked, set(indexes), report, seen)
        if len(report.damaged) == before:  # else reading the rows would fail on the same damage
            _check_rows(checked, report)
    return report


def _check_data(view: TableView, sizes: dict[str, int], report: Report, seen: set[str]) -> None:
    first = view.start
    for fragment, size in zip(view.fragments, view.sizes, strict=True):
        for data in fragment.files:
            name = f"{files.DATA}/{data.path}"
            if name in seen:
                continue
            seen.add(name)
            report.files += 1
            stored = sizes.get(name)
            if stored is None:
                report.add(name, "is missing", [first, first + size.rows])
            elif data.file_size_bytes and stored != data.file_size_bytes:
                problem = f"has {stored} bytes, its manifest says {data.file_size_bytes}"
                report.add(name, problem, [first, first + size.rows])
        first += size.rows


def _check_indexes(view: TableView, names: set[str], report: Report, seen: set[str]) -> None:
    for index in indices_of(view.dataset):
        for segment in index.segments:
            folder = f"{files.INDICES}/{segment.uuid}/"
            if folder in seen:
                continue
            seen.add(folder)
            found = sum(name.startswith(folder) for name in names)
            report.files += found
            if not found:
                report.add(folder, f"index {index.name} is missing")


def _check_rows(view: TableView, report: Report) -> None:
    try:
        rows = sum(batch.num_rows for batch in view.batches(view.start, view.rows))
    except TableError as exc:
        report.add(files.DATA, str(exc))
        return
    if rows != view.rows:
        report.add(files.DATA, f"has {rows} rows that can be read instead of {view.rows}")
    check_order(view, report)
