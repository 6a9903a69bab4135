"""verify() finds every file that is not what was written, and says which offsets it holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.crash import workloads
from support.crash.checking import Handle
from support.crash.recording import QuickFileSystem
from support.crash.workloads import History, Keeper, lance, no_log, wal

from persisting import fs
from persisting.queue import PersistingBackend


@pytest.fixture(autouse=True)
def _no_syncs() -> Iterator[None]:
    with fs.use(QuickFileSystem()):
        yield


WORDS = ("red", "green", "blue")


def record(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "n": number, "text": f"{WORDS[number % 3]} thing", **fields}


async def built(folder: Path, vectors: int = 0) -> None:
    """A bucket with every kind of file, all in use by its newest version or by a tag.

    ``narrow`` tags three fragments. The newest version has one that was compacted, one behind it,
    a column that was widened, and indexes; it begins at offset 2.
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
    """By file, the offsets that it holds, as Lance tells of them; None for those of indexes."""
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
    """What a reader finds who has seen nothing before."""
    reader = PersistingBackend(0, str(folder), read_only=True)
    report: dict[str, Any] = await reader.verify()
    await reader.close()
    return report


def damaged_files(report: dict[str, Any]) -> dict[str, list[int] | None]:
    assert report["ok"] is (not report["damaged"])
    return {one["file"]: one["offsets"] for one in report["damaged"]}


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    await built(tmp_path / "bucket")
    return tmp_path / "bucket"


async def test_a_healthy_bucket_is_ok_and_every_file_has_a_checksum(folder: Path) -> None:
    files = expected(folder)
    kinds = [name.split("/")[0] for name in files]
    assert kinds.count("data") >= 6
    assert kinds.count("_indices") >= 6
    assert any("-" not in name for name in files if name.startswith("data/")), "nothing was widened"
    report = await verified(folder)
    assert report["ok"]
    assert (report["damaged"], report["unchecked"]) == ([], [])
    assert report["files"] == len(files)


async def test_a_flipped_bit_anywhere_in_any_file_is_found_with_its_offsets(folder: Path) -> None:
    await flips_are_found(folder, 6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_thousands_of_flipped_bits_are_found_with_their_offsets(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    await built(folder, vectors=1100)
    await flips_are_found(folder, 200)


async def flips_are_found(folder: Path, times: int) -> None:
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
async def test_a_file_that_is_no_longer_whole_is_found_with_its_offsets(
    folder: Path, how: str
) -> None:
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


async def test_all_damaged_files_are_named_at_once(folder: Path) -> None:
    files = expected(folder)
    for name in files:
        path = folder / "data.lance" / name
        path.write_bytes(bytes(path.stat().st_size))
    assert damaged_files(await verified(folder)) == files


async def test_the_owner_finds_damage_that_came_after_it_had_read_everything(
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


async def test_verifying_changes_nothing_on_disk(folder: Path) -> None:
    def tree() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    name = next(iter(expected(folder)))
    path = folder / "data.lance" / name
    path.write_bytes(bytes(path.stat().st_size))
    before = tree()
    assert not (await verified(folder))["ok"]
    assert tree() == before


async def test_damage_that_only_an_untagged_old_version_has_is_no_damage_of_the_bucket(
    folder: Path,
) -> None:
    """Nothing that is promised to stay is touched."""
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


async def test_buffered_rows_have_no_file_and_an_empty_bucket_is_ok(tmp_path: Path) -> None:
    for open_bucket in (wal(), no_log(), lance()):
        handle = Handle(tmp_path / str(id(open_bucket)), open_bucket)
        report = await handle.backend.verify()
        assert (report["ok"], report["rows"], report["files"]) == (True, 0, 0)
        await handle.backend.put(record(0))
        assert (await handle.backend.verify())["ok"]
        await handle.backend.close()


async def test_looking_at_a_table_beside_its_upkeep_finds_no_damage_and_raises_nothing(
    tmp_path: Path,
) -> None:
    backend = PersistingBackend(0, str(tmp_path), flush_interval=None, keep_versions=0.001)
    await backend.put(record(0))
    await backend.create_index("n", "scalar")
    ended = False

    async def look(call: Callable[[], Awaitable[Any]]) -> int:
        """How often it was looked."""
        times = 0
        while not ended:
            found = await call()
            if isinstance(found, dict) and "damaged" in found:
                assert found["ok"], found
            times += 1
        return times

    calls = (backend.verify, backend.versions, backend.tags, backend.indexes, backend.get)
    looks = [asyncio.create_task(look(call)) for call in calls]
    try:
        for number in range(1, 25):
            await backend.put(record(number))
            await (backend.compact() if number % 3 == 0 else backend.flush())
            if number % 10 == 0:
                await backend.tag("some")
                await backend.retain(rows=5)
                await backend.restore("some")
    finally:
        ended = True
        assert all(await asyncio.gather(*looks))
    await backend.close()


class Verifying(Keeper):
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
async def test_every_step_of_a_history_leaves_every_file_with_a_checksum(
    tmp_path: Path, history: History
) -> None:
    await history(Verifying(tmp_path, wal()))


async def test_cleaning_versions_leaves_every_file_with_a_checksum(tmp_path: Path) -> None:
    await workloads.cleaning(Verifying(tmp_path, wal(keep_versions=0.001)))


async def test_every_step_of_a_random_history_leaves_every_file_with_a_checksum(
    tmp_path: Path,
) -> None:
    await workloads.any_upkeep(1, 30)(Verifying(tmp_path, wal(keep_versions=0.5)))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 20))
async def test_every_step_of_a_long_random_history_leaves_every_file_with_a_checksum(
    tmp_path: Path, seed: int
) -> None:
    await workloads.any_upkeep(seed, 150)(Verifying(tmp_path, wal(keep_versions=0.05)))
