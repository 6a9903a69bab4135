"""Compaction: joins small fragments without ever moving a row.

Lance orders rows by fragment number, and a rewritten fragment gets a new, higher number. So only a
**suffix** of the fragments may be rewritten, into fragments in the same order, with no append in
between: the caller holds the table.
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
"""A fragment of this size, in rows or bytes, is full: maintenance leaves it alone. The size bounds
what one compaction rewrites, and so how long a flush may have to wait for it."""

_MANY = 32
_EVEN = 16
_TOO_MANY = 512


class Limit(NamedTuple):
    """How large a fragment may become."""

    rows: int = FULL_ROWS
    nbytes: int = FULL_BYTES


def worthwhile(sizes: Sequence[Size], limit: Limit) -> int:
    """How many of the last fragments to rewrite now; 0 for none.

    Fragments grow in steps: many of similar size become one, and small ones that together make a
    full fragment become that. Each step multiplies the size of a fragment by at least 16 or is the
    last, so a row is rewritten two or three times in its life, whatever the size of the flushes.
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
    """How many of the last fragments one compaction may rewrite when too many have accumulated."""
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
"""Executes the tasks of :func:`plan`, possibly in other processes, and returns their results."""


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

    ``run`` executes the tasks in other processes, which call :func:`execute`.
    """
    tasks = plan(dataset, view, count, limit)
    if run is None:
        commit(dataset, view, count, (execute(dataset, task, root, fs) for task in tasks))
    else:
        commit(dataset, view, count, run(tasks))


def plan(dataset: Any, view: TableView, count: int, limit: Limit) -> list[str]:
    """The tasks, as JSON, that write one new fragment each, in the order of their rows."""
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

    ``dataset`` is a handle of the version that the task was planned for.
    """
    result = write(dataset, task)
    checksums.sign(fs, root, result["new_fragments"])
    new = [file["path"] for fragment in result["new_fragments"] for file in fragment["files"]]
    files.sync_data(fs, root, new)
    return result


def write(dataset: Any, task: str) -> dict[str, Any]:
    """Write the fragment of one task, as Lance writes it."""
    from lance import optimize

    # The JSON forms are missing in Lance's type stubs.
    task_of: Any = optimize.CompactionTask.from_json  # type: ignore[attr-defined]
    result: dict[str, Any] = json.loads(task_of(task).execute(dataset).json())
    return result


def commit(dataset: Any, view: TableView, count: int, results: Iterable[dict[str, Any]]) -> None:
    """Replace the last ``count`` fragments by the new ones, all or none."""
    from lance import optimize

    result_of: Any = optimize.RewriteResult.from_json  # type: ignore[attr-defined]
    ordered = _in_order(results, [fragment.id for fragment in view.fragments[-count:]])
    optimize.Compaction.commit(dataset, [result_of(json.dumps(result)) for result in ordered])
    _check_order(dataset, view, len(view.fragments) - count)


def _in_order(results: Iterable[dict[str, Any]], planned: list[int]) -> list[dict[str, Any]]:
    """Sort results by their rows, which is the order that Lance gives the new fragments.

    Raises unless they replace each of the ``planned`` fragments once.
    """
    ordered = sorted(results, key=lambda r: planned.index(r["original_fragments"][0]["id"]))
    done = [fragment["id"] for result in ordered for fragment in result["original_fragments"]]
    if done != planned:
        raise TableError(f"a compaction was planned for fragments {planned} and has done {done}")
    return ordered


def split_by_indexes(view: TableView, count: int, limit: Limit, *, at_all: bool) -> bool:
    """Whether index segments keep apart fragments that could be joined.

    Without ``at_all``, only if they are so many that the compaction would achieve little.
    """
    groups = _groups(view, count, limit)
    needed = _groups(view, count, limit, by_index=False)
    return len(groups) > len(needed) and (at_all or 2 * len(groups) > count)


def _groups(view: TableView, count: int, limit: Limit, *, by_index: bool = True) -> list[list[Any]]:
    """Groups of neighbours that become one fragment each, at most a full one.

    A group of one is rewritten too, to keep the order. Lance joins fragments only if every segment
    of every index covers all of them or none.
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
    """The index segments that cover each fragment."""
    covered: dict[int, frozenset[str]] = {}
    for index in indices_of(dataset):
        for segment in index.segments:
            for fragment in segment.fragment_ids:
                covered[fragment] = covered.get(fragment, frozenset()) | {segment.uuid}
    return covered


def _options(dataset: Any) -> dict[str, Any]:
    """Lance's defaults for a task, but a target size that no group reaches."""
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
    """Raise if any row has moved; the commit is then rolled back."""
    after = [fragment.metadata for fragment in dataset.get_fragments()]
    before = [fragment.id for fragment in view.fragments[:kept]]
    rows = sum(fragment.physical_rows for fragment in after)
    if [fragment.id for fragment in after[:kept]] != before or rows != view.rows:
        raise TableError(f"a compaction of {dataset.uri} would have moved rows; it was rolled back")
