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
    """A table, and what each of its versions held when it was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = Table(folder, fs.current())
        self.number = self.sequence = 0
        self.held: dict[int, tuple[int, list[int]]] = {}
        self.epochs: dict[int, int] = {}

    def note(self) -> None:
        """Remember the newest version; those that came with it hold what one of them does."""
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
        """A commit of Lance's own, which says nothing of ours."""
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
        version = operations.tag(self.table, fs.current(), name)
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
    def there(self) -> list[int]:
        return [one["version"] for one in versions.listing(self.table.view.dataset)]

    def check(self) -> None:
        """Every version that is there has the rows and offsets it had, for a new process too."""
        again = Table(self.folder, fs.current())
        again.refresh()
        assert again.view.version == self.table.view.version
        assert (again.view.start, numbers(again.view)) == self.held[again.view.version]
        assert len(again.restores) == len(self.table.restores)
        assert again.sequence == self.sequence
        for version in self.there:
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
    """Version v was made ``LONG_AGO - v`` days ago."""
    first = dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=LONG_AGO)
    monkeypatch.setattr(
        versions, "_timestamp", lambda entry: first + dt.timedelta(days=entry["version"])
    )


def keeping_after(version: int) -> float:
    """An age that versions up to this one are beyond."""
    return (LONG_AGO - version - 0.5) * DAY


# What may go


def test_old_versions_go_and_the_newest_stays(kept: Kept) -> None:
    for _ in range(5):
        kept.append()
    assert versions.outdated(kept.table.view.dataset, 0.0) == [1, 2, 3, 4]
    assert kept.clean(0.0) == 4
    assert kept.there == [5]
    kept.check()


def test_young_versions_stay(kept: Kept) -> None:
    for _ in range(5):
        kept.append()
    assert versions.outdated(kept.table.view.dataset, 3600.0) == []
    assert kept.clean(3600.0) == 0
    assert kept.there == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("a_version_a_day")
def test_only_what_is_older_goes(kept: Kept) -> None:
    for _ in range(5):
        kept.append()
    assert versions.outdated(kept.table.view.dataset, keeping_after(3)) == [1, 2, 3]


@pytest.mark.usefixtures("a_version_a_day")
def test_the_commit_that_tells_the_start_of_a_later_version_stays(kept: Kept) -> None:
    for _ in range(3):
        kept.append()
    kept.drop_first()
    telling = kept.table.view.version
    for _ in range(6):
        kept.change()
    young = kept.table.view.version - 1
    going = versions.outdated(kept.table.view.dataset, keeping_after(young - 1))
    assert telling not in going
    assert set(going) == set(range(1, young)) - {telling}
    kept.clean(keeping_after(young - 1))
    assert kept.table.at(young).start == 3
    kept.check()


@pytest.mark.usefixtures("a_version_a_day")
def test_what_told_for_versions_that_are_gone_goes_with_the_next_cleaning(kept: Kept) -> None:
    kept.append()
    kept.append()
    kept.drop_first()
    for _ in range(4):
        kept.change()
    kept.clean(keeping_after(kept.table.view.version - 1))
    kept.append()
    last = kept.table.view.version
    kept.clean(keeping_after(last - 1))
    assert kept.there == [last]
    kept.check()


@pytest.mark.usefixtures("a_version_a_day")
@pytest.mark.parametrize("seed", range(6))
def test_every_version_that_stays_reads_as_before_whatever_happened(kept: Kept, seed: int) -> None:
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
            assert operations.delete_tag(kept.table, fs.current(), name) == (name in tags)
            tags.pop(name, None)
        elif action == "restore":
            known = [version for version in kept.there if version in kept.held]
            version = rng.choice([0, *known])
            kept.restore(version)
            assert kept.held[kept.table.view.version] == (kept.held.get(version) or (0, []))
        elif action == "clean":
            kept.clean(keeping_after(rng.choice(kept.there)))
        else:
            kept.table = Table(kept.folder, fs.current())
            kept.table.open(left_clean=True)
        assert versions.tags(kept.table.view.dataset) == tags
        assert set(tags.values()) <= set(kept.there)
    kept.check()


# Tags


def test_a_tag_keeps_its_version_through_every_cleaning(kept: Kept) -> None:
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


def test_a_version_goes_when_its_tag_is_gone(kept: Kept) -> None:
    kept.append()
    tagged = kept.tag("kept")
    kept.append()
    kept.clean(0.0)
    assert tagged in kept.there
    assert operations.delete_tag(kept.table, fs.current(), "kept")
    kept.clean(0.0)
    assert tagged not in kept.there


def test_a_tag_moves_to_the_newest_version_when_it_is_made_again(kept: Kept) -> None:
    kept.append()
    first = kept.tag("moving")
    kept.append()
    second = kept.tag("moving")
    kept.append()
    kept.clean(0.0)
    assert versions.tags(kept.table.view.dataset) == {"moving": second}
    assert first not in kept.there
    kept.check()


async def test_tags_outlive_versions_that_are_kept_for_no_time_at_all(persisting: Bucket) -> None:
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


# Which one is meant


def test_a_number_means_that_version_while_it_is_there(kept: Kept) -> None:
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


def test_a_name_means_the_tagged_version(kept: Kept) -> None:
    kept.append()
    with pytest.raises(InvalidArgument, match="no tag 'a'; there are: none"):
        versions.resolve(kept.table.view.dataset, "a")
    tagged = kept.tag("b")
    kept.append()
    assert versions.resolve(kept.table.view.dataset, "b") == tagged
    with pytest.raises(InvalidArgument, match="no tag 'a'; there are: 'b'"):
        versions.resolve(kept.table.view.dataset, "a")


@pytest.mark.parametrize("version", [True, 1.0, None, b"tag", ("tag",)])
def test_what_is_no_version_is_refused(kept: Kept, version: Any) -> None:
    kept.append()
    with pytest.raises(InvalidArgument, match="version must be"):
        versions.resolve(kept.table.view.dataset, version)


def test_a_moment_means_the_newest_version_that_was_there_then(kept: Kept) -> None:
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


def test_a_moment_without_a_zone_is_local_time(kept: Kept) -> None:
    kept.append()
    kept.append()
    dataset = kept.table.view.dataset
    first = versions.listing(dataset)[0]["timestamp"]
    assert versions.resolve(dataset, first.astimezone().replace(tzinfo=None)) == 1


def test_a_moment_before_the_first_version_means_an_empty_table(kept: Kept) -> None:
    kept.append()
    long_ago = dt.datetime(2001, 1, 1, tzinfo=dt.timezone.utc)
    assert versions.resolve(kept.table.view.dataset, long_ago) == versions.NOTHING
    assert kept.table.at(versions.NOTHING).rows == 0


def test_a_moment_whose_version_is_gone_is_refused(kept: Kept) -> None:
    kept.append()
    long_ago = versions.listing(kept.table.view.dataset)[0]["timestamp"]
    kept.append()
    kept.clean(0.0)
    with pytest.raises(InvalidArgument, match=r"no version from .* is left"):
        versions.resolve(kept.table.view.dataset, long_ago)


def test_the_listing_says_what_each_version_is(kept: Kept) -> None:
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


# Beside readers


def test_listing_versions_disturbs_no_reader_of_the_same_view(kept: Kept) -> None:
    for _ in range(5):
        kept.append()
    view = kept.table.view
    with ThreadPoolExecutor(4) as pool:
        listed = [pool.submit(versions.listing, view.dataset) for _ in range(40)]
        read = [pool.submit(numbers, view) for _ in range(40)]
        told = [pool.submit(properties.read, view.dataset) for _ in range(40)]
        for one in listed:
            assert [v["version"] for v in one.result()] == [1, 2, 3, 4, 5]
        assert all(one.result() == list(range(15)) for one in read)
        assert all(one.result() == kept.table.properties for one in told)


def test_versions_are_listed_and_meant_while_others_are_removed(kept: Kept) -> None:
    kept.append()
    tagged = kept.tag("kept")
    done = threading.Event()

    def look() -> int:
        seen = 0
        while not done.is_set():
            dataset = kept.table.view.dataset
            assert tagged in [one["version"] for one in versions.listing(dataset)]
            assert versions.resolve(dataset, tagged) == tagged
            assert versions.resolve(dataset, "kept") == tagged
            seen += 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        for _ in range(8):
            for _ in range(4):
                kept.append(1)
            kept.clean(0.0)
        done.set()
        assert all(one.result() for one in looking)


@pytest.mark.parametrize("value", [2, 2.5], ids=["new-field", "wider-field"])
async def test_a_restored_version_brings_its_fields_and_types_back(
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
