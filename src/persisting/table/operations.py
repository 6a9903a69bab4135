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
from persisting.table import compaction, files, indexes, properties, versions
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

    table.committer.change("compact", work, several=True)
    table.committer.record_checksums()


def drop_first(table: Table, count: int) -> int:
    """Drop the first ``count`` fragments; how many rows went. The offsets of the others stay."""
    from lance import LanceOperation

    view = table.view
    rows = sum(size.rows for size in view.sizes[:count])
    gone = [fragment.id for fragment in view.fragments[:count]]
    operation = LanceOperation.Delete([], gone, "true")
    table.committer.commit("drop old rows of", operation, {START: str(view.start + rows)})
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
        table.committer.commit(
            "checkpoint", LanceOperation.UpdateConfig(config_updates=entries), {}
        )


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
    table.committer.commit("restore", operation, changed, keep_properties=False)
    if table.view.rows != target.rows:
        raise TableError(
            f"{table.root} has {table.view.rows} rows after a restore to {target.rows}"
        )
    # The version may be one between an index and its checksums. The restore is done in any case;
    # what fails here is left to the next owner.
    with suppress(TableError):
        table.committer.drop_untrusted_indexes()
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
        table.committer.change(
            "index", partial(indexes.build, wanted=one, rows=table.view.rows), several=True
        )
        done.append(one.name)
    for name in indexes.unwanted(table.view.dataset, wanted):
        drop_index(table, name)
    table.committer.record_checksums()
    return done


def drop_index(table: Table, name: str) -> None:
    """Drop the index of that name."""
    table.committer.change("drop an index of", methodcaller("drop_index", name))


def optimize_indexes(table: Table, *, whole: bool = False) -> None:
    """Have every index cover every row; ``whole`` also makes one part of each.

    New rows become a part of their own, which costs little; many parts slow a search down.
    """
    parts = max(
        (len(one.segments) for one in indexes.built(table.view.dataset).values()), default=0
    )
    merged = {"num_indices_to_merge": parts} if whole or parts > _MOST_PARTS else {}
    table.committer.change(
        "index", lambda dataset: dataset.optimize.optimize_indices(**merged), several=True
    )
    table.committer.record_checksums()
