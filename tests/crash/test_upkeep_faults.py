"""The disk fails at any call of the upkeep: the call raises, nothing changes, and work goes on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.crash.checking import (
    BUCKET,
    Handle,
    Open,
    Replay,
    State,
    check_health,
    check_state,
    read_state,
    worked_on,
)
from support.crash.disk import EVERYTHING, after_power_loss, lay_out
from support.crash.faulty import ERRORS, FaultyFileSystem
from support.crash.recording import QuickFileSystem
from support.crash.workloads import AGED, every_kind, kept, lance, no_log, wal
from support.faults import FaultyFileSystem as CountedFaults

from persisting import fs
from persisting.errors import StorageError


@pytest.fixture(autouse=True)
def _no_syncs() -> Iterator[None]:
    with fs.use(QuickFileSystem()):
        yield


def record(number: int) -> dict[str, Any]:
    return {"id": f"r{number}", "n": number, "text": f"words of {number}"}


MORE = (record(100), record(101))


@dataclass(frozen=True)
class Work:
    """A piece of upkeep, and what it makes of a state."""

    do: Callable[[Any], Awaitable[Any]]
    then: Callable[[State, Any], State] = lambda state, _: state


def dropped(state: State, done: dict[str, int]) -> State:
    assert done["start_offset"] > state.now.start
    return replace(state, now=state.now.from_offset(done["start_offset"]))


def tagged(name: str) -> Callable[[State, Any], State]:
    return lambda state, _: replace(state, tags={**state.tags, name: state.now})


def untagged(name: str) -> Callable[[State, Any], State]:
    return lambda state, _: replace(state, tags={k: v for k, v in state.tags.items() if k != name})


def restored(name: str) -> Callable[[State, Any], State]:
    return lambda state, _: replace(state, now=state.tags[name], epoch=state.epoch + 1)


WORKS = {
    "compact": Work(lambda backend: backend.compact()),
    "retain": Work(lambda backend: backend.retain(rows=2), dropped),
    "tag": Work(lambda backend: backend.tag("new"), tagged("new")),
    "tag-again": Work(lambda backend: backend.tag("old"), tagged("old")),
    "delete-tag": Work(lambda backend: backend.delete_tag("old"), untagged("old")),
    "restore": Work(lambda backend: backend.restore("old"), restored("old")),
    "create-index": Work(lambda backend: backend.create_index("text")),
    "create-index-again": Work(lambda backend: backend.create_index("n", "scalar")),
    "drop-index": Work(lambda backend: backend.drop_index("n")),
}
LONG = {"compact", "create-index", "create-index-again"}
EITHER = {"tag", "tag-again", "delete-tag"}
"""A tag is a file of its own: when its sync fails it may be there or not."""


async def made(folder: Path, open_bucket: Open) -> State:
    """A closed bucket with fragments, a tag, an index, and rows that the index lacks."""
    handle = Handle(folder, open_bucket)
    for number in range(5):
        await handle.backend.put(record(number))
        await handle.backend.flush()
        if number == 1:
            await handle.backend.tag("old")
        if number == 2:
            await handle.backend.create_index("n", "scalar")
    state = await read_state(handle.backend)
    await handle.backend.close()
    return state


def dataset_of(folder: Path, version: int | None = None) -> Any:
    """A version of the table, as Lance itself sees it."""
    import lance as raw

    return raw.dataset(str(folder / "data.lance"), version=version)


def unused(folder: Path) -> set[str]:
    """Data files that no version uses."""
    used = {
        file.path
        for version in dataset_of(folder).versions()
        for part in dataset_of(folder, version["version"]).get_fragments()
        for file in part.data_files()
    }
    return {path.name for path in (folder / "data.lance" / "data").iterdir()} - used


class WatchedFaults(FaultyFileSystem):
    """Knows whether the fault hit a note, which may be lost without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.hit_a_note = False
        self._noting = False

    def write_note(self, path: Path, data: bytes) -> None:
        self._noting = True
        try:
            super().write_note(path, data)
        finally:
            self._noting = False

    def _fails(self, name: str) -> bool:
        fails = super()._fails(name)
        self.hit_a_note |= fails and self._noting
        return fails


async def with_a_fault(
    folder: Path,
    open_bucket: Open,
    before: State,
    name: str,
    index: int,
    code: int,
    *,
    lasting: bool,
) -> bool:
    """One fault in one piece of work; whether there was a call with that number."""
    disk, work = WatchedFaults(), WORKS[name]
    with fs.use(disk):
        handle = Handle(folder, open_bucket)
    disk.arm(index, code, lasting=lasting)
    try:
        done = await work.do(handle.backend)
    except StorageError:
        assert disk.fired
        allowed = [before, work.then(before, None)] if name in EITHER else [before]
        check_state(await read_state(handle.backend), allowed)
        disk.heal()
        check_state(await read_state(handle.backend), allowed)
        if name == "compact" and not lasting:  # else they cannot be removed either
            assert not unused(folder), "the failed compaction left files"
        done = await work.do(handle.backend)
        assert done or name in ("delete-tag", "drop-index")  # done at the first try after all
    else:
        harmless = disk.fired and (disk.hit_a_note or disk.calls[index] == "remove")
        assert not disk.fired or harmless, f"a failed {disk.calls[index]} was ignored"
        disk.heal()
    after = work.then(before, done)
    check_state(await read_state(handle.backend), [after])
    if name == "drop-index":
        assert not dataset_of(folder).describe_indices(), "the index is still there"
    if index % 3 == 0:
        after = await worked_on(handle.backend, after, list(MORE))
    await handle.drop()
    handle = Handle(folder, open_bucket)
    check_state(await read_state(handle.backend), [after])
    await check_health(handle.backend, after.now.rows)
    await handle.backend.close()
    return disk.fired


async def every_fault(
    tmp_path: Path, open_bucket: Open, name: str, error: str, *, lasting: bool, step: int = 1
) -> int:
    """A fault at every ``step``-th call of a piece of work; how many calls there are."""
    before = await made(tmp_path / "source", open_bucket)
    for index in range(0, 10_000, step):
        folder = tmp_path / str(index)
        shutil.copytree(tmp_path / "source", folder)
        try:
            if not await with_a_fault(
                folder, open_bucket, before, name, index, ERRORS[error], lasting=lasting
            ):
                return index
        except Exception as exc:
            raise AssertionError(f"{error} at call {index}: {type(exc).__name__}: {exc}") from exc
        shutil.rmtree(folder)
    raise AssertionError("the work never ended")


@pytest.mark.parametrize("name", WORKS)
async def test_a_fault_in_the_upkeep_raises_and_changes_nothing(tmp_path: Path, name: str) -> None:
    step = 4 if name in LONG else 2
    assert await every_fault(tmp_path, wal(), name, "EIO", lasting=False, step=step) > 1


async def test_a_fault_while_versions_are_cleaned_raises_and_changes_nothing(
    tmp_path: Path,
) -> None:
    opener = wal(keep_versions=0.001)
    assert await every_fault(tmp_path, opener, "compact", "EIO", lasting=False, step=7) > 8


@pytest.mark.parametrize(("name", "step"), [("compact", 8), ("restore", 4), ("create-index", 8)])
async def test_a_lasting_fault_in_the_upkeep_raises_and_changes_nothing(
    tmp_path: Path, name: str, step: int
) -> None:
    assert await every_fault(tmp_path, no_log(), name, "ENOSPC", lasting=True, step=step) > 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", WORKS)
async def test_every_fault_at_every_call_of_the_upkeep_raises_and_changes_nothing(
    tmp_path: Path, name: str, error: str, lasting: bool
) -> None:
    for number, opener in enumerate((wal(), no_log(), lance(), wal(keep_versions=0.001))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert await every_fault(folder, opener, name, error, lasting=lasting) > 1


# Faults while opening, and in the upkeep that runs by itself


async def test_a_fault_while_opening_after_a_kill_in_the_upkeep_leaves_everything_to_the_next(
    tmp_path: Path,
) -> None:
    keeper = await kept(tmp_path / "disk", AGED, every_kind)
    moments = [m for m in keeper.recorder.recording.moments if m.label.startswith("before sync_")]
    replay = Replay(keeper.recorder.recording, keeper.states, AGED, tmp_path)
    for number, moment in enumerate(moments[:: len(moments) // 4]):
        tree, allowed = after_power_loss(moment.disk, EVERYTHING), replay.allowed(moment)
        for index in range(number, 10_000, 9):
            disk, root = FaultyFileSystem(), tmp_path / f"{number}-{index}"
            lay_out(tree, root)
            disk.arm(index, ERRORS["EIO"], lasting=False)
            with fs.use(disk):
                try:
                    handle = Handle(root / BUCKET, AGED)
                except StorageError:
                    assert disk.fired
                else:
                    disk.heal()
                    check_state(await read_state(handle.backend), allowed)
                    await handle.drop()
            handle = Handle(root / BUCKET, AGED)
            state = check_state(await read_state(handle.backend), allowed)
            await check_health(handle.backend, state.now.rows)
            await handle.backend.close()
            shutil.rmtree(root)
            if not disk.fired:
                break
        assert index > 5


class Photographer(FaultyFileSystem):
    """Copies a folder before each call: what a kill would leave there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = None
        self.copies: list[Path] = []

    def _fails(self, name: str) -> bool:
        if self.folder is not None:
            copy = self.folder.with_name(f"{self.folder.name}-{len(self.copies)}")
            shutil.copytree(self.folder, copy)
            self.copies.append(copy)
        return super()._fails(name)


async def test_a_kill_behind_a_compaction_that_was_taken_back_leaves_a_bucket_that_opens(
    tmp_path: Path,
) -> None:
    await killed_behind_a_fault(tmp_path, "compact", step=4)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WORKS)
async def test_a_kill_behind_any_change_that_was_taken_back_leaves_a_bucket_that_opens(
    tmp_path: Path, name: str
) -> None:
    await killed_behind_a_fault(tmp_path, name)


async def killed_behind_a_fault(tmp_path: Path, name: str, step: int = 1) -> None:
    """The next version gets the number of the one that is gone; a kill comes at any call of it."""
    await made(tmp_path / "source", wal())
    taken_back = 0
    for index in range(0, 10_000, step):
        disk, folder = Photographer(), tmp_path / str(index)
        shutil.copytree(tmp_path / "source", folder)
        with fs.use(disk):
            handle = Handle(folder, wal())
        disk.arm(index, ERRORS["EIO"], lasting=False)
        with contextlib.suppress(StorageError):
            await WORKS[name].do(handle.backend)
        if not disk.fired:
            break
        if "sync_folder" in disk.calls[index + 1 :]:  # where manifests were removed again
            taken_back += 1
            found = await read_state(handle.backend)
            allowed = [found, replace(found, now=found.now.with_more(record(9)))]
            disk.folder = folder
            await handle.backend.put(record(9))
            await handle.backend.flush()
            disk.folder = None
        await handle.drop()
        for copy in disk.copies[:: 1 + len(disk.copies) // max(2, 6 // step)]:
            handle = Handle(copy, wal())
            check_state(await read_state(handle.backend), allowed)
            await handle.backend.close()
            shutil.rmtree(copy)
    assert taken_back or name.endswith("tag")


async def test_upkeep_that_fails_by_itself_is_told_and_tried_again(tmp_path: Path) -> None:
    """Only upkeep makes files through the seam in a bucket without a log: puts are not hit."""
    disk = CountedFaults()
    with fs.use(disk):
        backend = no_log()(tmp_path)
    disk.fail_always("create", error=ERRORS["ENOSPC"])
    for number in range(34):
        await backend.put(record(number))
        await backend.flush()
    stats = await reported(backend, lambda stats: stats["upkeep_error"] is not None)
    assert "No space left" in stats["upkeep_error"] or "injected" in stats["upkeep_error"]
    assert stats["fragments"] == 34
    assert [row["n"] for row in await backend.get()] == list(range(34))
    disk.heal()
    await backend.put(record(34))
    await backend.flush()
    stats = await reported(backend, lambda stats: stats["fragments"] < 34)
    await reported(backend, lambda stats: stats["upkeep_error"] is None)
    assert [row["n"] for row in await backend.get()] == list(range(35))
    assert not unused(tmp_path)
    await backend.close()


async def reported(backend: Any, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The bucket's stats once they are as wanted."""
    for _ in range(3000):
        stats: dict[str, Any] = await backend.stats()
        if wanted(stats):
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came: {stats}")
