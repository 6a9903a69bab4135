"""The changes of a table other than appends; each is durable when it returns.

The caller holds the table: nothing else is written to it meanwhile.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any

from persisting.errors import TableError
from persisting.fs import FileSystem
from persisting.records import EMPTY
from persisting.table import compaction, indexes, properties, versions
from persisting.table.compaction import Limit
from persisting.table.indexes import IndexSpec
from persisting.table.lance_errors import translated
from persisting.table.properties import (
    LOSS,
    RESTORES,
    SEQUENCE,
    START,
    Restored,
    encode_restores,
)
from persisting.table.table import Table
from persisting.table.view import TableView

log = logging.getLogger("persisting")

_MOST_SEGMENTS = 8


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

    With ``whole`` every index is first extended to all of them, so that no index keeps fragments
    apart. ``run`` writes the files in other processes.
    """
    if compaction.split_by_indexes(table.view, count, limit, at_all=whole):
        optimize_indexes(table, whole=True)
    view = table.view

    def work(dataset: Any) -> None:
        written_by = run or table.committer.compaction_run(dataset)
        compaction.rewrite(dataset, view, count, limit, table.root, fs, written_by)

    table.committer.change("compact", work, several=True)
    table.committer.record_checksums()


def drop_first(table: Table, count: int) -> int:
    """Drop the first ``count`` fragments; return how many rows they had. Other offsets stay."""
    from lance import LanceOperation

    view = table.view
    rows = sum(size.rows for size in view.sizes[:count])
    dropped = [fragment.id for fragment in view.fragments[:count]]
    operation = LanceOperation.Delete([], dropped, "true")
    table.committer.commit("drop old rows of", operation, {START: str(view.start + rows)})
    return rows


def checkpoint(table: Table) -> None:
    """Have the newest version carry the properties, so that older ones are not needed for them."""
    view = table.view
    assert view.dataset is not None
    with translated("read a transaction of", table.root):
        own = properties.own(view.dataset, view.version)
    if own is None:
        table.committer.checkpoint()


def begin_epoch_after_loss(table: Table) -> None:
    """Commit a new epoch, since readers may have seen rows beyond the end that are lost.

    A table that does not exist yet is created for it: the next owner may die without a flush, too.
    """
    committer, before = table.committer, table.properties
    raised = {RESTORES: encode_restores([*table.restores, Restored(table.view.end, LOSS)])}
    if table.view.dataset is None:
        table.create(EMPTY, raised)
        return
    committer.properties = {**before, **raised}
    try:
        committer.checkpoint()
    except BaseException:
        committer.properties = before
        raise


def restore(table: Table, version: int, token: str) -> TableView:
    """Make the content of ``version`` the newest version; ``token`` identifies the call."""
    from lance import LanceOperation

    target = table.at(version)
    then = {} if target.dataset is None else table.committer.properties_of(target.dataset)
    # Rows that later restores removed come back: they differ from the present rows from where the
    # shortest of these restores ended.
    since = table.restores[len(properties.restores_of(then)) :]
    parting = min([target.end, *(restored.end for restored in since)])
    restores = [*table.restores, Restored(parting, token)]
    changed = {
        **then,
        # The log has continued since: its records up to now must not be replayed.
        SEQUENCE: str(table.sequence),
        START: str(target.start),
        RESTORES: encode_restores(restores),
    }
    if version == versions.NOTHING:
        dropped = [fragment.id for fragment in table.view.fragments]
        operation: Any = LanceOperation.Delete([], dropped, "true")
    else:
        operation = table.committer.restoring(target)
    table.committer.commit("restore", operation, changed, keep_properties=False)
    if table.view.rows != target.rows:
        raise TableError(
            f"{table.root} has {table.view.rows} rows after a restore to {target.rows}"
        )
    # The version may have an index whose checksums were not recorded yet. The restore is done in
    # any case; if this fails, the next owner does it.
    with suppress(TableError):
        table.committer.drop_untrusted_indexes()
    return table.view


def tag(table: Table, name: str) -> int:
    """Tag the newest version; return its number."""
    checkpoint(table)
    view = table.view
    assert view.dataset is not None
    table.committer.write_tag(name)
    return view.version


def delete_tag(table: Table, name: str) -> bool:
    """Delete a tag; return whether it existed."""
    dataset = table.view.dataset
    if dataset is None or name not in versions.tags(dataset):
        return False
    table.committer.remove_tag(name)
    return True


def clean(table: Table, keep_seconds: float) -> int:
    """Remove untagged versions older than ``keep_seconds``; return how many."""
    outdated = table.committer.outdated(keep_seconds)
    if outdated:
        checkpoint(table)
        table.committer.remove_versions(outdated)
    return len(outdated)


def build_indexes(table: Table, specs: list[IndexSpec]) -> list[str]:
    """Build missing indexes and drop those no longer requested; return the names built."""
    done = []
    for spec in indexes.missing(table.view.dataset, specs, table.view.rows):
        table.committer.change(
            "index", partial(indexes.build, spec=spec, rows=table.view.rows), several=True
        )
        done.append(spec.name)
    for name in indexes.unwanted(table.view.dataset, specs):
        drop_index(table, name)
    table.committer.record_checksums()
    return done


def drop_index(table: Table, name: str) -> None:
    """Drop the index of that name."""
    table.committer.change("drop an index of", methodcaller("drop_index", name))


def optimize_indexes(table: Table, *, whole: bool = False) -> None:
    """Extend every index to all rows; ``whole`` also merges the segments of each into one.

    New rows get a segment of their own, which is cheap; many segments slow a search down.
    """
    segments = max(
        (len(index.segments) for index in indexes.built(table.view.dataset).values()), default=0
    )
    merged = {"num_indices_to_merge": segments} if whole or segments > _MOST_SEGMENTS else {}
    table.committer.change(
        "index", lambda dataset: dataset.optimize.optimize_indices(**merged), several=True
    )
    table.committer.record_checksums()
