"""What Lance does with commits of a former owner.

Everything in persisting.table.fenced_commit rests on this matrix: another release of Lance must not
change it unnoticed.
"""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance import LanceOperation
from support.fault_proxy import FaultProxy
from support.object_stores import SeaweedFS, storage_options, url
from support.waiting import until_true

from persisting.table import versions

ROWS = pa.table({"n": pa.array([1, 2, 3], pa.int64()), "text": ["a", "b", "c"]})
Options = dict[str, str]


@pytest.fixture
def options(server: SeaweedFS) -> Options:
    return server.options()


@pytest.fixture
def uri(prefix: str) -> str:
    return f"{url(prefix)}/data.lance"


@pytest.fixture
def table(uri: str, options: Options) -> Any:
    """A table of two fragments, at version 2."""
    lance.write_dataset(ROWS, uri, enable_stable_row_ids=True, storage_options=options)
    return lance.write_dataset(ROWS, uri, mode="append", storage_options=options)


def fence(dataset: Any, properties: dict[str, str] | None = None) -> Any:
    fragments = [fragment.metadata for fragment in dataset.get_fragments()]
    operation = LanceOperation.Merge(fragments, dataset.lance_schema)
    transaction = lance.Transaction(
        dataset.version, operation, transaction_properties=properties or {}
    )
    handle = dataset.checkout_version(dataset.version)
    return lance.LanceDataset.commit(handle, transaction, max_retries=0)


def commit(dataset: Any, operation: Any, **more: Any) -> Any:
    return lance.LanceDataset.commit(dataset, lance.Transaction(dataset.version, operation), **more)


def append(dataset: Any, **more: Any) -> Any:
    transaction = lance.fragment.write_fragments(
        ROWS, dataset, mode="append", return_transaction=True
    )
    return lance.LanceDataset.commit(dataset, transaction, enable_stable_row_ids=True, **more)


def fragments_of(dataset: Any) -> list[Any]:
    return [fragment.metadata for fragment in dataset.get_fragments()]


def delete_a_row(dataset: Any) -> Any:
    """Commit a deletion of one row that was prepared on the version of the handle."""
    changed = dataset.get_fragments()[0].delete("n = 2")
    return commit(dataset, LanceOperation.Delete([changed], [], "n = 2"))


def reserve_fragments(dataset: Any) -> Any:
    """Begin a compaction, which reserves numbers of fragments; the binding has no such operation
    of its own."""
    with pytest.raises((OSError, ValueError, RuntimeError), match=r"onflict|ncompatible"):
        dataset.optimize.compact_files()
    newest = dataset.checkout_version(dataset.latest_version)
    transaction = newest.read_transaction(newest.version)
    assert transaction.read_version == dataset.version
    # The binding has no name for a reservation.
    assert type(transaction.operation) is LanceOperation.BaseOperation


REFUSED: dict[str, Callable[[Any], Any]] = {
    "append": append,
    "append without retries": lambda ds: append(ds, max_retries=0),
    "update (retention)": lambda ds: commit(ds, LanceOperation.Update(removed_fragment_ids=[0])),
    "delete (whole fragments)": lambda ds: commit(ds, LanceOperation.Delete([], [0], "true")),
    "delete (one row)": delete_a_row,
    "rewrite (compaction)": lambda ds: ds.optimize.compact_files(),
    "schema metadata": lambda ds: ds.update_schema_metadata({"key": "value"}),
    "field metadata": lambda ds: ds.update_field_metadata({"n": {"key": "value"}}),
    "merge (add a column)": lambda ds: ds.add_columns(pa.schema([pa.field("new", pa.int64())])),
    "merge (fence)": fence,
    "project (drop a column)": lambda ds: ds.drop_columns(["text"]),
    "project (rename a column)": lambda ds: ds.alter_columns({"path": "text", "name": "renamed"}),
}
REFUSED["overwrite without retries (restore)"] = lambda ds: commit(
    ds,
    LanceOperation.Overwrite(ds.lance_schema, fragments_of(ds)[:1]),
    enable_stable_row_ids=True,
    max_retries=0,
)
ACCEPTED: dict[str, Callable[[Any], Any]] = {
    "restore": lambda ds: commit(ds, LanceOperation.Restore(1)),
    "update config": lambda ds: ds.update_config({"key": "value"}),
    "create index": lambda ds: ds.create_scalar_index("n", "BTREE"),
    "reserve fragments": reserve_fragments,
    # Lance runs these again on the newest version when their commit is refused.
    "delete by a condition": lambda ds: ds.delete("n = 2"),
    "update by a condition": lambda ds: ds.update({"text": "'z'"}, where="n = 2"),
}


def test_fence_changes_neither_rows_nor_row_ids_nor_indexes(table: Any) -> None:
    table.create_scalar_index("n", "BTREE")
    before = table.to_table(with_row_id=True)
    fenced = fence(table, {"persisting.sequence": "5"})
    assert fenced.version == table.version + 1
    assert fenced.to_table(with_row_id=True).equals(before)
    assert [index.name for index in fenced.describe_indices()] == ["n_idx"]
    transaction = fenced.read_transaction(fenced.version)
    assert transaction.transaction_properties == {"persisting.sequence": "5"}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fence_refuses_the_former_owner(table: Any, uri: str, options: Options, name: str) -> None:
    fence(table)
    before = lance.dataset(uri, storage_options=options)
    with pytest.raises((OSError, ValueError, RuntimeError), match=r"onflict|ncompatible"):
        REFUSED[name](table)
    after = lance.dataset(uri, storage_options=options)
    # A compaction first reserves numbers of fragments, in a commit that changes no row.
    assert after.version == before.version + (name == "rewrite (compaction)")
    assert after.to_table(with_row_id=True).equals(before.to_table(with_row_id=True))
    assert after.schema.equals(before.schema, check_metadata=True)


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_fence_does_not_refuse_these_operations(table: Any, name: str) -> None:
    """They are not used on tables in object stores, except for a reservation, which changes no row.
    If one is refused some day, it could be."""
    version = fence(table).version
    ACCEPTED[name](table)
    assert table.latest_version > version


def test_overwrite_refuses_an_index_of_the_rows_before(table: Any) -> None:
    """A restore gives numbers of fragments to other rows: an old index must not cover them."""
    stale = table.checkout_version(table.version)
    operation = LanceOperation.Overwrite(table.lance_schema, fragments_of(table)[1:])
    done = commit(table, operation, enable_stable_row_ids=True, max_retries=0)
    with pytest.raises((OSError, ValueError, RuntimeError), match=r"onflict|ncompatible"):
        stale.create_scalar_index("n", "BTREE")
    assert done.count_rows() == 3
    appended = append(done)
    assert appended.to_table().column("n").to_pylist() == [1, 2, 3, 1, 2, 3]


def test_without_a_fence_the_append_of_a_former_owner_is_accepted(table: Any) -> None:
    stale = table.checkout_version(table.version)
    append(table.checkout_version(table.version))
    assert append(stale, max_retries=0).version == table.version + 2


def test_fence_is_committed_after_what_it_read_or_fails(table: Any) -> None:
    stale = table.checkout_version(table.version)
    append(table.checkout_version(table.version))
    with pytest.raises((OSError, ValueError, RuntimeError), match=r"onflict|ncompatible"):
        fence(stale)


def test_fence_that_was_cleaned_up_refuses_nothing(table: Any) -> None:
    """So the newest fence is never removed."""
    stale = table.checkout_version(table.version)
    fenced = fence(table)
    append(fenced)
    newest = fenced.checkout_version(fenced.version)
    newest.checkout_latest()
    newest.cleanup_old_versions(versions=[fenced.version], error_if_tagged_old_versions=False)
    assert append(stale).count_rows() == 12


def test_cleaning_removes_a_file_that_no_version_names_after_seven_days(tmp_path: Path) -> None:
    """In a folder, whose files can be made older; Lance compares the ages that any store gives.

    So what a killed writer has left goes, and the files of one that lives stay until its commit.
    """
    table = lance.write_dataset(ROWS, tmp_path / "data.lance", enable_stable_row_ids=True)
    table = lance.write_dataset(ROWS, table, mode="append")
    ages = {}
    for days in (0, 6, 8):
        (fragment,) = lance.fragment.write_fragments(ROWS, table, mode="append")
        ages[days] = tmp_path / "data.lance" / "data" / fragment.files[0].path
        old = time.time() - days * 86_400
        os.utime(ages[days], (old, old))
    versions.remove(table, [1])
    assert {days for days, path in ages.items() if path.exists()} == {0, 6}
    assert [version["version"] for version in table.versions()] == [2]
    assert table.count_rows() == 6


def created(uri: str, options: Options, **more: Any) -> Any:
    operation = LanceOperation.Overwrite(ROWS.schema, [])
    return lance.LanceDataset.commit(
        uri,
        lance.Transaction(0, operation),
        enable_stable_row_ids=True,
        storage_options=options,
        **more,
    )


def test_late_creation_replaces_a_table_unless_it_has_no_retries(
    table: Any, uri: str, options: Options
) -> None:
    with pytest.raises((OSError, ValueError, RuntimeError)):
        created(uri, options, max_retries=0)
    assert lance.dataset(uri, storage_options=options).count_rows() == 6
    created(uri, options)
    assert lance.dataset(uri, storage_options=options).count_rows() == 0


@pytest.mark.parametrize("held", ["LIST", "PUT"])
def test_creation_that_was_overtaken_fails_without_retries(
    proxy: FaultProxy, uri: str, options: Options, held: str
) -> None:
    overtaken = threading.Event()
    fault = proxy.add(held, until=overtaken, times=1)
    results: list[object] = []

    def create_late() -> None:
        try:
            done = created(uri, storage_options(proxy.port, timeout="60s"), max_retries=0)
            results.append((done.version, done.latest_version))
        except Exception as exc:
            results.append(exc)

    late = threading.Thread(target=create_late)
    late.start()
    assert fault.reached.wait(60)
    try:
        lance.write_dataset(ROWS, uri, enable_stable_row_ids=True, storage_options=options)
        lance.write_dataset(ROWS, uri, mode="append", storage_options=options)
    finally:
        overtaken.set()
    late.join()
    assert isinstance(results[0], Exception)
    assert lance.dataset(uri, storage_options=options).count_rows() == 6


def test_delayed_commit_may_succeed_at_a_version_that_no_reader_sees(
    table: Any, proxy: FaultProxy, uri: str, options: Options
) -> None:
    """So the log is released only if the commit is the newest version, which costs one request."""
    slow = lance.dataset(uri, storage_options=storage_options(proxy.port, timeout="60s"))
    transaction = lance.fragment.write_fragments(ROWS, slow, mode="append", return_transaction=True)
    overtaken = threading.Event()
    held = proxy.add("PUT-if-absent", also="/_versions/", until=overtaken, times=1)
    results: list[tuple[int, int]] = []

    def commit_late() -> None:
        done = lance.LanceDataset.commit(slow, transaction, enable_stable_row_ids=True)
        results.append((done.version, done.latest_version))

    late = threading.Thread(target=commit_late)
    late.start()
    assert held.reached.wait(60)
    try:
        for _ in range(3):
            lance.write_dataset(ROWS, uri, mode="append", storage_options=options)
        lance.dataset(uri, storage_options=options).cleanup_old_versions(older_than=dt.timedelta(0))
    finally:
        overtaken.set()
    late.join()
    ((version, newest),) = results
    assert version < newest
    assert lance.dataset(uri, storage_options=options).count_rows() == 15


def test_strict_overwrite_after_a_removed_version_succeeds_where_no_reader_sees_it(
    table: Any, uri: str, options: Options
) -> None:
    """So the first flush, and a restore, count only if they are the newest version."""
    former = table.checkout_version(table.version)
    late = lance.fragment.write_fragments(
        ROWS, former, mode="overwrite", return_transaction=True, storage_options=options
    )
    newest = fence(table)
    for _ in range(2):
        newest = append(newest)
    removed = list(range(1, newest.version))
    newest.cleanup_old_versions(versions=removed, error_if_tagged_old_versions=False)
    landed = lance.LanceDataset.commit(former, late, enable_stable_row_ids=True, max_retries=0)
    assert landed.version == former.version + 1
    assert landed.latest_version == newest.version
    assert lance.dataset(uri, storage_options=options).count_rows() == 12


def test_commit_whose_answer_is_lost_lands_once(
    table: Any, proxy: FaultProxy, uri: str, options: Options
) -> None:
    proxy.add("PUT-if-absent", times=1, lose=True)
    append(lance.dataset(uri, storage_options=storage_options(proxy.port)))
    assert lance.dataset(uri, storage_options=options).count_rows() == 9


def test_commit_that_raises_may_have_landed(
    table: Any, proxy: FaultProxy, uri: str, options: Options
) -> None:
    """So after an error the committer fences, and checks what the table holds."""
    slow = lance.dataset(uri, storage_options=storage_options(proxy.port, timeout="1s"))
    raised = threading.Event()
    held = proxy.add("PUT-if-absent", times=1, until=raised)
    with pytest.raises(OSError, match="error sending request"):
        append(slow)
    assert held.met == 1
    raised.set()
    until_true(lambda: lance.dataset(uri, storage_options=options).count_rows() == 9)
