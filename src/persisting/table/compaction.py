"""Putting small fragments together, without ever moving a row.

Lance keeps rows in the order of fragment numbers, and a rewritten fragment gets a new, higher one.
So only a **suffix** of the fragments may be rewritten, into fragments in the same order, while no
append can come between: the caller holds the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from persisting.errors import TableError
from persisting.fs import FileSystem
from persisting.table import checksums, files
from persisting.table.lance_errors import indices_of
from persisting.table.view import Size, TableView

FULL_ROWS = 262_144
FULL_BYTES = 64 * 1024 * 1024
"""A fragment as large as this, in rows or bytes, is done: upkeep leaves it alone. It bounds what
one compaction rewrites, and so how long a flush may have to wait for it."""

_MANY = 32
_EVEN = 16
_TOO_MANY = 512


class Limit(NamedTuple):
    """How large a fragment may become."""

    rows: int = FULL_ROWS
    nbytes: int = FULL_BYTES


def worthwhile(sizes: Sequence[Size], limit: Limit) -> int:
    """How many of the last fragments to rewrite now, 0 for none.

    Fragments grow in steps: many of about one size become one, and what has come together to a
    full fragment becomes that. Each step multiplies the size of a fragment by at least 16 or is
    the last, so a row is rewritten two or three times in its life, whatever the flushes' size.
    """
    tail = _small_tail(sizes, limit)
    rows, nbytes = sum(s.rows for s in tail), sum(s.nbytes for s in tail)
    if len(tail) > 1 and (rows >= limit.rows or nbytes >= limit.nbytes or len(tail) >= _TOO_MANY):
        return _bounded(tail, limit)
    best = total = largest = 0
    for count, size in enumerate(reversed(tail), 1):
        total, largest = total + size.rows, max(largest, size.rows)
        if count >= _MANY and largest * _EVEN <= total:
            best = count
    return best


def _bounded(tail: Sequence[Size], limit: Limit) -> int:
    """As many of the last fragments as one compaction may rewrite, where too much has piled up."""
    rows = nbytes = count = 0
    for size in reversed(tail):
        rows, nbytes = rows + size.rows, nbytes + size.nbytes
        if count > 1 and (rows > 2 * limit.rows or nbytes > 2 * limit.nbytes):
            break
        count += 1
    return count


def _small_tail(sizes: Sequence[Size], limit: Limit) -> Sequence[Size]:
    """The last fragments that are far from full."""
    count = 0
    for size in reversed(sizes):
        if size.rows * 4 > limit.rows or size.nbytes * 4 > limit.nbytes:
            break
        count += 1
    return sizes[len(sizes) - count :]


def everything(sizes: Sequence[Size], limit: Limit) -> int:
    """How many of the last fragments to rewrite so that none is needlessly small."""
    for index, size in enumerate(sizes[:-1]):
        if size.rows * 2 <= limit.rows and size.nbytes * 2 <= limit.nbytes:
            return len(sizes) - index
    return 0


Run: TypeAlias = "Callable[[list[str]], Iterable[dict[str, Any]]]"
"""Has tasks of :func:`plan` executed, somewhere, and gives the result of each."""


def rewrite(
    dataset: Any,
    view: TableView,
    count: int,
    limit: Limit,
    root: Path,
    fs: FileSystem,
    run: Run | None = None,
) -> None:
    """Rewrite the last ``count`` fragments of ``dataset``, a fresh handle of the view's version.

    ``run`` has other processes execute the tasks; each calls :func:`execute`.
    """
    tasks = plan(dataset, view, count, limit)
    here = (execute(dataset, task, root, fs) for task in tasks)
    commit(dataset, view, count, here if run is None else run(tasks))


def plan(dataset: Any, view: TableView, count: int, limit: Limit) -> list[str]:
    """Tasks, as JSON, that each make one new fragment; in the order of their rows."""
    options = _options(dataset)
    return [
        json.dumps(
            {
                "task": {"fragments": [fragment.to_json() for fragment in group]},
                "read_version": dataset.version,
                "options": options,
            }
        )
        for group in _groups(view, count, limit)
    ]


def execute(dataset: Any, task: str, root: Path, fs: FileSystem) -> dict[str, Any]:
    """Write the fragment of one task, signed and synced; nothing refers to it until the commit.

    ``dataset`` is any handle of the version that the task was planned for.
    """
    from lance import optimize

    # The JSON forms are missing in Lance's type stubs.
    task_of: Any = optimize.CompactionTask.from_json  # type: ignore[attr-defined]
    result: dict[str, Any] = json.loads(task_of(task).execute(dataset).json())
    checksums.sign(fs, root, result["new_fragments"])
    new = [file["path"] for fragment in result["new_fragments"] for file in fragment["files"]]
    files.sync_data(fs, root, new)
    return result


def commit(dataset: Any, view: TableView, count: int, results: Iterable[dict[str, Any]]) -> None:
    """Put the new fragments in the place of the last ``count``, all of them or none."""
    from lance import optimize

    result_of: Any = optimize.RewriteResult.from_json  # type: ignore[attr-defined]
    ordered = _in_order(results, [fragment.id for fragment in view.fragments[-count:]])
    optimize.Compaction.commit(dataset, [result_of(json.dumps(result)) for result in ordered])
    _check_order(dataset, view, len(view.fragments) - count)


def _in_order(results: Iterable[dict[str, Any]], wanted: list[int]) -> list[dict[str, Any]]:
    """Results in the order of their rows, which is the order that Lance gives the new fragments.

    Raises unless they replace the fragments ``wanted``, each once.
    """
    ordered = sorted(results, key=lambda one: wanted.index(one["original_fragments"][0]["id"]))
    found = [fragment["id"] for one in ordered for fragment in one["original_fragments"]]
    if found != wanted:
        raise TableError(f"a compaction was planned for fragments {wanted} and has done {found}")
    return ordered


def split_by_indexes(view: TableView, count: int, limit: Limit, *, at_all: bool) -> bool:
    """Whether the parts of indexes lie so that joining the fragments would achieve little, or
    less than it could."""
    groups = _groups(view, count, limit)
    needed = _groups(view, count, limit, by_index=False)
    return len(groups) > len(needed) and (at_all or 2 * len(groups) > count)


def _groups(view: TableView, count: int, limit: Limit, *, by_index: bool = True) -> list[list[Any]]:
    """Neighbours that make a full fragment together; one alone is rewritten too, to keep order.

    Lance joins fragments only if every part of every index covers all of them or none.
    """
    covered = _coverage(view.dataset) if by_index else {}
    groups: list[list[Any]] = [[]]
    rows = nbytes = 0
    for fragment, size in zip(view.fragments[-count:], view.sizes[-count:], strict=True):
        if groups[-1] and (
            rows >= limit.rows
            or nbytes >= limit.nbytes
            or covered.get(groups[-1][-1].id) != covered.get(fragment.id)
        ):
            groups.append([])
            rows = nbytes = 0
        groups[-1].append(fragment)
        rows, nbytes = rows + size.rows, nbytes + size.nbytes
    return groups


def _coverage(dataset: Any) -> dict[int, frozenset[str]]:
    """By fragment, the parts of indexes that cover it."""
    found: dict[int, frozenset[str]] = {}
    for index in indices_of(dataset):
        for segment in index.segments:
            for fragment in segment.fragment_ids:
                found[fragment] = found.get(fragment, frozenset()) | {segment.uuid}
    return found


def _options(dataset: Any) -> dict[str, Any]:
    """Lance's own defaults for a task, with a target that no group reaches."""
    return {
        "target_rows_per_fragment": 2**40,
        "max_rows_per_group": 1024,
        "max_bytes_per_file": None,
        "materialize_deletions": True,
        "materialize_deletions_threshold": 0.1,
        "num_threads": None,
        "batch_size": None,
        "io_buffer_size": None,
        "defer_index_remap": False,
        "index_remap_mode": "Direct",
        "compaction_mode": None,
        "enable_binary_copy": False,
        "enable_binary_copy_force": False,
        "binary_copy_read_batch_bytes": 16 * 1024 * 1024,
        "max_source_fragments": None,
        "max_source_rows": None,
        "max_source_bytes": None,
        "excluded_fragment_ids": [],
        "max_overlays_per_fragment": 10,
        "data_storage_version": dataset.data_storage_version,
        "has_eager_remappable_index": any(
            index.index_type == "BTree" for index in indices_of(dataset)
        ),
    }


def _check_order(dataset: Any, view: TableView, kept: int) -> None:
    """Raise, so that the commit is taken back, unless every row is where it was."""
    after = [fragment.metadata for fragment in dataset.get_fragments()]
    before = [fragment.id for fragment in view.fragments[:kept]]
    rows = sum(fragment.physical_rows for fragment in after)
    if [fragment.id for fragment in after[:kept]] != before or rows != view.rows:
        raise TableError(f"a compaction of {dataset.uri} would have moved rows; it is taken back")
