"""verify() reports every file that differs from what was written, with its offsets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.crash import workloads
from support.crash.checks import CrashableBucket
from support.crash.workloads import History, RecordedTable, lance, no_log, wal

from persisting.queue import PersistingBackend

pytestmark = pytest.mark.usefixtures("no_syncs")


WORDS = ("red", "green", "blue")


def record(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "n": number, "text": f"{WORDS[number % 3]} thing", **fields}


async def create_bucket(folder: Path, vectors: int = 0) -> None:
    """Create a bucket with every kind of file, all used by the newest version or by a tag.

    ``narrow`` tags three fragments. The newest version has a compacted fragment, one after it, a
    widened column and indexes, and starts at offset 2.
    """
    backend = PersistingBackend(0, str(folder), flush_interval=None, compaction=False)
    for number in range(0, 6, 2):
        await backend.put_batch([record(number, v=number), record(number + 1, v=number)])
        await backend.flush()
    await backend.tag("narrow")
    await backend.retain(rows=4)
    await backend.put(record(6, v=6.5))
    await backend.flush()
    await backend.tag("wide")
    await backend.compact()
    points = [[i / 7 % 1, i / 11 % 1] for i in range(vectors)]
    await backend.put_batch(
        [record(7, v=7), *(record(8 + i, v=i, point=point) for i, point in enumerate(points))]
    )
    await backend.create_index("n", "scalar")
    await backend.create_index("text")
    if vectors:
        await backend.create_index("point")
    assert len(await backend.indexes()) == (3 if vectors else 2)
    assert (await backend.stats())["start_offset"] == 2
    await backend.close()


def expected(folder: Path) -> dict[str, list[int] | None]:
    """Return the offsets in each file as reported by Lance; None for index files."""
    import lance as raw

    root = folder / "data.lance"
    newest = raw.dataset(str(root))
    starts = {"narrow": 0, "wide": 2, "newest": 2}
    versions = {name: int(tag["version"]) for name, tag in newest.tags.list().items()}
    found: dict[str, list[int] | None] = {}
    for name, version in {**versions, "newest": newest.version}.items():
        dataset, first = raw.dataset(str(root), version=version), starts[name]
        for part in dataset.get_fragments():
            for file in part.data_files():
                found[f"data/{file.path}"] = [first, first + part.count_rows()]
            first += part.count_rows()
        for index in dataset.describe_indices():
            for segment in index.segments:
                place = root / "_indices" / segment.uuid
                found |= {str(p.relative_to(root)): None for p in place.rglob("*") if p.is_file()}
    return found


async def verified(folder: Path) -> dict[str, Any]:
    """Return the report of a new reader."""
    reader = PersistingBackend(0, str(folder), read_only=True)
    report: dict[str, Any] = await reader.verify()
    await reader.close()
    return report


def damaged_files(report: dict[str, Any]) -> dict[str, list[int] | None]:
    assert report["ok"] is (not report["damaged"])
    return {entry["file"]: entry["offsets"] for entry in report["damaged"]}


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    await create_bucket(tmp_path / "bucket")
    return tmp_path / "bucket"


async def test_intact_bucket_verifies_and_every_file_has_a_checksum(folder: Path) -> None:
    files = expected(folder)
    kinds = [name.split("/")[0] for name in files]
    assert kinds.count("data") >= 6
    assert kinds.count("_indices") >= 6
    assert any("-" not in name for name in files if name.startswith("data/")), "nothing was widened"
    report = await verified(folder)
    assert report["ok"]
    assert (report["damaged"], report["unchecked"]) == ([], [])
    assert report["files"] == len(files)


async def test_flipped_bit_in_any_file_is_reported_with_its_offsets(folder: Path) -> None:
    await check_flipped_bits(folder, 6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_thousands_of_flipped_bits_are_reported_with_their_offsets(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    await create_bucket(folder, vectors=1100)
    await check_flipped_bits(folder, 200)


async def check_flipped_bits(folder: Path, times: int) -> None:
    rng = random.Random(times)
    for name, offsets in expected(folder).items():
        path = folder / "data.lance" / name
        whole = path.read_bytes()
        places = [0, len(whole) * 8 - 1, *(rng.randrange(len(whole) * 8) for _ in range(times))]
        for place in places:
            torn = bytearray(whole)
            torn[place // 8] ^= 1 << place % 8
            path.write_bytes(torn)
            report = await verified(folder)
            assert damaged_files(report) == {name: offsets}, f"bit {place} of {name}"
        path.write_bytes(whole)
    assert (await verified(folder))["ok"]


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer", "zeroed", "another's bytes"])
async def test_incomplete_file_is_reported_with_its_offsets(folder: Path, how: str) -> None:
    files = expected(folder)
    for name, offsets in files.items():
        path = folder / "data.lance" / name
        whole = path.read_bytes()
        other = next(
            (folder / "data.lance" / other).read_bytes() for other in files if other != name
        )
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(
                {
                    "empty": b"",
                    "cut": whole[:-1],
                    "longer": whole + b"x",
                    "zeroed": bytes(len(whole)),
                    "another's bytes": other,
                }[how]
            )
        report = await verified(folder)
        path.write_bytes(whole)
        assert damaged_files(report) == {name: offsets}
    assert (await verified(folder))["ok"]


async def test_all_damaged_files_are_reported_together(folder: Path) -> None:
    files = expected(folder)
    for name in files:
        path = folder / "data.lance" / name
        path.write_bytes(bytes(path.stat().st_size))
    assert damaged_files(await verified(folder)) == files


async def test_owner_reports_damage_to_files_it_has_already_read(
    folder: Path,
) -> None:
    files = expected(folder)
    backend = PersistingBackend(0, str(folder), flush_interval=None)
    rows = await backend.get()
    assert (await backend.verify())["ok"]
    for name, offsets in files.items():
        path = folder / "data.lance" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert damaged_files(await backend.verify()) == {name: offsets}
        path.write_bytes(whole)
    assert (await backend.verify())["ok"]
    assert await backend.get() == rows
    await backend.close()


async def test_verify_changes_nothing_on_disk(folder: Path) -> None:
    def tree() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    name = next(iter(expected(folder)))
    path = folder / "data.lance" / name
    path.write_bytes(bytes(path.stat().st_size))
    before = tree()
    assert not (await verified(folder))["ok"]
    assert tree() == before


async def test_damage_to_an_untagged_old_version_is_not_reported(
    folder: Path,
) -> None:
    """The damaged files belong to no tag and not to the newest version."""
    backend = PersistingBackend(0, str(folder), flush_interval=None)
    only_tagged = set(expected(folder))
    await backend.delete_tag("narrow")
    await backend.delete_tag("wide")
    only_tagged -= set(expected(folder))
    assert only_tagged
    for name in only_tagged:
        (folder / "data.lance" / name).unlink()
    assert (await backend.verify())["ok"]
    await backend.close()


async def test_empty_and_buffered_buckets_verify(tmp_path: Path) -> None:
    for open_bucket in (wal(), no_log(), lance()):
        handle = CrashableBucket(tmp_path / str(id(open_bucket)), open_bucket)
        report = await handle.backend.verify()
        assert (report["ok"], report["rows"], report["files"]) == (True, 0, 0)
        await handle.backend.put(record(0))
        assert (await handle.backend.verify())["ok"]
        await handle.backend.close()


async def test_inspection_during_maintenance_raises_nothing_and_reports_no_damage(
    tmp_path: Path,
) -> None:
    backend = PersistingBackend(0, str(tmp_path), flush_interval=None, keep_versions=0.001)
    await backend.put(record(0))
    await backend.create_index("n", "scalar")
    done = False

    async def inspect(call: Callable[[], Awaitable[Any]]) -> int:
        """Call until the maintenance ends; return how many times."""
        times = 0
        while not done:
            found = await call()
            if isinstance(found, dict) and "damaged" in found:
                assert found["ok"], found
            times += 1
        return times

    calls = (backend.verify, backend.versions, backend.tags, backend.indexes, backend.get)
    inspections = [asyncio.create_task(inspect(call)) for call in calls]
    try:
        for number in range(1, 25):
            await backend.put(record(number))
            await (backend.compact() if number % 3 == 0 else backend.flush())
            if number % 10 == 0:
                await backend.tag("some")
                await backend.retain(rows=5)
                await backend.restore("some")
    finally:
        done = True
        assert all(await asyncio.gather(*inspections))
    await backend.close()


class Verifying(RecordedTable):
    """Verifies after every step."""

    async def _done(self) -> None:
        await super()._done()
        report = await self.backend.verify()
        assert report["ok"], report
        assert report["unchecked"] == []
        assert report["rows"] == (await self.backend.stats())["persisted_count"]


HISTORIES: dict[str, History] = {
    name: getattr(workloads, name) for name in ("tagging", "restores", "indexing", "evolving")
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
async def test_every_file_has_a_checksum_after_every_maintenance_step(
    tmp_path: Path, history: History
) -> None:
    await history(Verifying(tmp_path, wal()))


async def test_every_file_has_a_checksum_after_version_cleanup(tmp_path: Path) -> None:
    await workloads.cleaning(Verifying(tmp_path, wal(keep_versions=0.001)))


async def test_every_file_has_a_checksum_after_every_step_of_a_random_history(
    tmp_path: Path,
) -> None:
    await workloads.random_maintenance(1, 30)(Verifying(tmp_path, wal(keep_versions=0.5)))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 20))
async def test_every_file_has_a_checksum_after_every_step_of_a_long_random_history(
    tmp_path: Path, seed: int
) -> None:
    await workloads.random_maintenance(seed, 150)(Verifying(tmp_path, wal(keep_versions=0.05)))
