"""Which version is meant, which may go, and what those that stay still say of themselves."""

from __future__ import annotations

import datetime as dt
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.buckets import Bucket

from persisting import fs
from persisting.errors import InvalidArgument
from persisting.table import operations, properties, versions
from persisting.table.compaction import Limit
from persisting.table.layout import ARRIVAL_FIELD
from persisting.table.table import Table

SCHEMA = pa.schema([("i", pa.int64())])
DAY = 86_400.0
LONG_AGO = 1000
OFTEN = ["append", "change", "change", "clean"]
ACTIONS = [*OFTEN, *OFTEN, "drop", "compact", "tag", "untag", "restore", "reopen"]


class Kept:
    """A table, and the content of each of its versions when it was committed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = Table(folder, fs.current())
        self.number = self.sequence = 0
        self.held: dict[int, tuple[int, list[int]]] = {}
        self.epochs: dict[int, int] = {}

    def note(self) -> None:
        """Remember the content of the newest version."""
        view = self.table.view
        self.held[view.version] = (view.start, numbers(view))
        self.epochs[view.version] = len(self.table.restores)

    def append(self, rows: int = 3) -> None:
        self.sequence += 1
        found = list(range(self.number, self.number + rows))
        self.number += rows
        batch = pa.RecordBatch.from_pydict({"i": found}, schema=SCHEMA)
        times = pa.array([self.sequence] * rows, ARRIVAL_FIELD.type)
        self.table.append([(batch, times)], SCHEMA, self.sequence)
        self.note()

    def change(self) -> None:
        """Commit as Lance itself does, without our properties."""
        self.table.committer.change(
            "change", lambda dataset: dataset.update_config({"any": "thing"})
        )
        self.note()

    def compact(self) -> None:
        count = len(self.table.view.sizes)
        if count > 1:
            operations.compact(self.table, fs.current(), count, Limit())
            self.note()

    def drop_first(self) -> None:
        if self.table.view.sizes:
            operations.drop_first(self.table, 1)
            self.note()

    def tag(self, name: str) -> int:
        version = operations.tag(self.table, name)
        self.note()
        return version

    def restore(self, version: int) -> None:
        operations.restore(self.table, version, f"token-{self.table.view.version}")
        self.note()

    def clean(self, keep_seconds: float) -> int:
        removed = operations.clean(self.table, keep_seconds)
        self.note()
        return removed

    @property
    def existing(self) -> list[int]:
        return [one["version"] for one in versions.listing(self.table.view.dataset)]

    def check(self) -> None:
        """Check, with a new table, that every version still has its rows and offsets."""
        again = Table(self.folder, fs.current())
        again.refresh()
        assert again.view.version == self.table.view.version
        assert (again.view.start, numbers(again.view)) == self.held[again.view.version]
        assert len(again.restores) == len(self.table.restores)
        assert again.sequence == self.sequence
        for version in self.existing:
            if version not in self.held:
                continue
            view = again.at(version)
            assert (view.start, numbers(view)) == self.held[version], f"version {version}"
            kept = properties.read(view.dataset)
            assert len(properties.restores_of(kept)) == self.epochs[version]


def numbers(view: Any) -> list[int]:
    return [n for batch in view.batches(view.start, view.rows) for n in batch["i"].to_pylist()]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


@pytest.fixture
def a_version_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that version v was committed ``LONG_AGO - v`` days ago."""
    first = dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=LONG_AGO)
    monkeypatch.setattr(
        versions, "_timestamp", lambda entry: first + dt.timedelta(days=entry["version"])
    )


def keeping_after(version: int) -> float:
    """An age that is exceeded by versions up to this one."""
    return (LONG_AGO - version - 0.5) * DAY


# Cleaning


def test_cleaning_removes_old_versions_and_keeps_the_newest(kept: Kept) -> None:
    for _ in range(5):
        kept.append()
    assert versions.outdated(kept.table.view.dataset, 0.0) == [1, 2, 3, 4]
    assert kept.clean(0.0) == 4
    assert kept.existing == [5]
    kept.check()


def test_cleaning_keeps_recent_versions(kept: Kept) -> None:
    for _ in range(5):
        kept.append()
    assert versions.outdated(kept.table.view.dataset, 3600.0) == []
    assert kept.clean(3600.0) == 0
    assert kept.existing == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("a_version_a_day")
def test_cleaning_removes_only_versions_older_than_the_limit(kept: Kept) -> None:
    for _ in range(5):
        kept.append()
    assert versions.outdated(kept.table.view.dataset, keeping_after(3)) == [1, 2, 3]


@pytest.mark.usefixtures("a_version_a_day")
def test_cleaning_keeps_the_commit_that_carries_the_properties_of_a_kept_version(
    kept: Kept,
) -> None:
    for _ in range(3):
        kept.append()
    kept.drop_first()
    carrying = kept.table.view.version
    for _ in range(6):
        kept.change()
    recent = kept.table.view.version - 1
    outdated = versions.outdated(kept.table.view.dataset, keeping_after(recent - 1))
    assert carrying not in outdated
    assert set(outdated) == set(range(1, recent)) - {carrying}
    kept.clean(keeping_after(recent - 1))
    assert kept.table.at(recent).start == 3
    kept.check()


@pytest.mark.usefixtures("a_version_a_day")
def test_cleaning_later_removes_a_commit_kept_only_for_its_properties(kept: Kept) -> None:
    kept.append()
    kept.append()
    kept.drop_first()
    for _ in range(4):
        kept.change()
    kept.clean(keeping_after(kept.table.view.version - 1))
    kept.append()
    last = kept.table.view.version
    kept.clean(keeping_after(last - 1))
    assert kept.existing == [last]
    kept.check()


@pytest.mark.usefixtures("a_version_a_day")
@pytest.mark.parametrize("seed", range(6))
def test_every_remaining_version_reads_the_same_after_random_operations(
    kept: Kept, seed: int
) -> None:
    rng = random.Random(seed)
    tags: dict[str, int] = {}
    kept.append()
    for _ in range(40):
        action = rng.choice(ACTIONS)
        if action == "append":
            kept.append(rng.randint(1, 4))
        elif action == "change":
            kept.change()
        elif action == "drop":
            kept.drop_first()
        elif action == "compact":
            kept.compact()
        elif action == "tag":
            name = rng.choice("abc")
            tags[name] = kept.tag(name)
        elif action == "untag":
            name = rng.choice("abc")
            assert operations.delete_tag(kept.table, name) == (name in tags)
            tags.pop(name, None)
        elif action == "restore":
            known = [version for version in kept.existing if version in kept.held]
            version = rng.choice([0, *known])
            kept.restore(version)
            assert kept.held[kept.table.view.version] == (kept.held.get(version) or (0, []))
        elif action == "clean":
            kept.clean(keeping_after(rng.choice(kept.existing)))
        else:
            kept.table = Table(kept.folder, fs.current())
            kept.table.open(left_clean=True)
        assert versions.tags(kept.table.view.dataset) == tags
        assert set(tags.values()) <= set(kept.existing)
    kept.check()


# Tags


def test_a_tagged_version_survives_every_cleaning(kept: Kept) -> None:
    kept.append()
    kept.append()
    kept.drop_first()
    tagged = kept.tag("kept")
    for _ in range(3):
        kept.append()
        kept.compact()
        kept.change()
        kept.clean(0.0)
    kept.drop_first()
    kept.clean(0.0)
    assert versions.tags(kept.table.view.dataset) == {"kept": tagged}
    assert kept.table.at(tagged).start == 3
    kept.check()
    kept.restore(tagged)
    kept.clean(0.0)
    assert (kept.table.view.start, numbers(kept.table.view)) == kept.held[tagged]
    kept.check()


def test_a_version_is_removed_after_its_tag_is_deleted(kept: Kept) -> None:
    kept.append()
    tagged = kept.tag("kept")
    kept.append()
    kept.clean(0.0)
    assert tagged in kept.existing
    assert operations.delete_tag(kept.table, "kept")
    kept.clean(0.0)
    assert tagged not in kept.existing


def test_tagging_again_moves_the_tag_to_the_newest_version(kept: Kept) -> None:
    kept.append()
    first = kept.tag("moving")
    kept.append()
    second = kept.tag("moving")
    kept.append()
    kept.clean(0.0)
    assert versions.tags(kept.table.view.dataset) == {"moving": second}
    assert first not in kept.existing
    kept.check()


def test_drafts_that_a_crash_left_are_ignored_and_removed_by_the_next_owner(kept: Kept) -> None:
    kept.append()
    tagged = kept.tag("kept")
    drafts = [
        kept.table.root / "_refs" / "tags" / "kept.json.0123456789abcdef.tmp",
        kept.folder / "indexes.json.0123456789abcdef.tmp",
    ]
    for draft in drafts:
        draft.write_bytes(b"{")
    assert versions.tags(kept.table.view.dataset) == {"kept": tagged}
    table = Table(kept.folder, fs.current())
    table.open(left_clean=False)
    assert not any(draft.exists() for draft in drafts)
    assert versions.tags(table.view.dataset) == {"kept": tagged}


async def test_tagged_versions_survive_with_a_minimal_keep_versions(persisting: Bucket) -> None:
    backend = persisting.open(keep_versions=1e-6, flush_interval=None)
    expected = {}
    for number in range(12):
        await backend.put_batch([{"i": number, "text": "x"}] * 3)
        await backend.flush()
        if number == 6:
            await backend.retain(rows=9)
        if number % 4 == 0:
            await backend.create_index("i")
            made = await backend.tag(f"tag-{number}")
            expected[f"tag-{number}"] = (made["start_offset"], await backend.get())
        await backend.compact()
    await backend.restore("tag-4")
    await backend.compact()
    backend = await persisting.reopen(backend, keep_versions=1e-6, flush_interval=None)
    await backend.compact()
    assert len(await backend.versions()) <= len(expected) + 3
    for name, (start, records) in expected.items():
        assert await backend.get(start, version=name) == records
    assert await backend.get() == expected["tag-4"][1]


# Resolving


def test_a_version_number_resolves_while_the_version_exists(kept: Kept) -> None:
    for _ in range(3):
        kept.append()
    dataset = kept.table.view.dataset
    assert [versions.resolve(dataset, n) for n in (0, 1, 3)] == [0, 1, 3]
    for missing in (4, -1, 10**9):
        with pytest.raises(InvalidArgument, match="versions 1 to 3 are kept"):
            versions.resolve(dataset, missing)
    kept.clean(0.0)
    with pytest.raises(InvalidArgument, match="does not exist"):
        versions.resolve(kept.table.view.dataset, 1)


def test_a_tag_name_resolves_to_the_tagged_version(kept: Kept) -> None:
    kept.append()
    with pytest.raises(InvalidArgument, match="no tag 'a'; there are: none"):
        versions.resolve(kept.table.view.dataset, "a")
    tagged = kept.tag("b")
    kept.append()
    assert versions.resolve(kept.table.view.dataset, "b") == tagged
    with pytest.raises(InvalidArgument, match="no tag 'a'; there are: 'b'"):
        versions.resolve(kept.table.view.dataset, "a")


@pytest.mark.parametrize("version", [True, 1.0, None, b"tag", ("tag",)])
def test_an_invalid_version_reference_is_refused(kept: Kept, version: Any) -> None:
    kept.append()
    with pytest.raises(InvalidArgument, match="version must be"):
        versions.resolve(kept.table.view.dataset, version)


def test_a_point_in_time_resolves_to_the_newest_version_of_that_time(kept: Kept) -> None:
    for _ in range(4):
        kept.append()
    dataset = kept.table.view.dataset
    listed = versions.listing(dataset)
    for one in listed:
        assert versions.resolve(dataset, one["timestamp"]) == one["version"]
        before = one["timestamp"] - dt.timedelta(microseconds=1)
        assert versions.resolve(dataset, before) == one["version"] - 1
    later = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=1)
    assert versions.resolve(dataset, later) == 4


def test_a_datetime_without_timezone_is_local_time(kept: Kept) -> None:
    kept.append()
    kept.append()
    dataset = kept.table.view.dataset
    first = versions.listing(dataset)[0]["timestamp"]
    assert versions.resolve(dataset, first.astimezone().replace(tzinfo=None)) == 1


def test_a_time_before_the_first_version_resolves_to_an_empty_table(kept: Kept) -> None:
    kept.append()
    long_ago = dt.datetime(2001, 1, 1, tzinfo=dt.timezone.utc)
    assert versions.resolve(kept.table.view.dataset, long_ago) == versions.NOTHING
    assert kept.table.at(versions.NOTHING).rows == 0


def test_a_time_whose_version_was_removed_is_refused(kept: Kept) -> None:
    kept.append()
    long_ago = versions.listing(kept.table.view.dataset)[0]["timestamp"]
    kept.append()
    kept.clean(0.0)
    with pytest.raises(InvalidArgument, match=r"no version from .* is left"):
        versions.resolve(kept.table.view.dataset, long_ago)


def test_the_listing_shows_rows_and_operation_of_each_version(kept: Kept) -> None:
    kept.append(3)
    kept.append(2)
    kept.drop_first()
    kept.restore(1)
    listed = versions.listing(kept.table.view.dataset)
    assert [one["version"] for one in listed] == [1, 2, 3, 4]
    assert [one["rows"] for one in listed] == [3, 5, 2, 3]
    assert [one["operation"] for one in listed] == ["append", "append", "retain", "restore"]
    times = [one["timestamp"] for one in listed]
    assert times == sorted(times)
    assert all(one.tzinfo is not None for one in times)


# Concurrent readers


def test_listing_versions_does_not_disturb_readers_of_the_same_view(kept: Kept) -> None:
    for _ in range(5):
        kept.append()
    view = kept.table.view
    with ThreadPoolExecutor(4) as pool:
        listed = [pool.submit(versions.listing, view.dataset) for _ in range(40)]
        read = [pool.submit(numbers, view) for _ in range(40)]
        read_properties = [pool.submit(properties.read, view.dataset) for _ in range(40)]
        for one in listed:
            assert [v["version"] for v in one.result()] == [1, 2, 3, 4, 5]
        assert all(one.result() == list(range(15)) for one in read)
        assert all(one.result() == kept.table.properties for one in read_properties)


def test_versions_are_listed_and_resolved_while_others_are_removed(kept: Kept) -> None:
    kept.append()
    tagged = kept.tag("kept")
    done = threading.Event()

    def read() -> int:
        seen = 0
        while not done.is_set():
            dataset = kept.table.view.dataset
            assert tagged in [one["version"] for one in versions.listing(dataset)]
            assert versions.resolve(dataset, tagged) == tagged
            assert versions.resolve(dataset, "kept") == tagged
            seen += 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        for _ in range(8):
            for _ in range(4):
                kept.append(1)
            kept.clean(0.0)
        done.set()
        assert all(one.result() for one in reading)


@pytest.mark.parametrize("value", [2, 2.5], ids=["new-field", "wider-field"])
async def test_a_restore_brings_back_the_fields_and_types_of_the_version(
    persisting: Bucket, value: float
) -> None:
    backend = persisting.open(flush_interval=None)
    await backend.put({"x": 1})
    await backend.tag("narrow")
    await backend.put({"x": value, "y": "new"})
    await backend.tag("wide")
    await backend.restore("narrow")
    backend = await persisting.reopen(backend, flush_interval=None)
    assert await backend.get() == [{"x": 1}]
    await backend.restore("wide")
    expected = [{"x": 1, "y": None}, {"x": value, "y": "new"}]
    assert await backend.get() == expected
    await backend.put({"x": 3})
    expected.append({"x": 3, "y": None})
    assert await backend.get() == expected
    backend = await persisting.reopen(backend, flush_interval=None)
    assert await backend.get() == expected
