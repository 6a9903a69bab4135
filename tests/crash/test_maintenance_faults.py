"""A disk fault at any call of maintenance makes it raise, changes nothing, and work continues."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.crash.checks import (
    BUCKET,
    CrashableBucket,
    Open,
    State,
    TableCrashExplorer,
    check_health,
    check_state,
    continue_work,
    read_state,
    stats_when,
)
from support.crash.disk_model import KEEP_EVERYTHING, after_power_loss, write_tree
from support.crash.failing_disk import ERRORS, FaultyFileSystem
from support.crash.workloads import (
    WITH_DEFAULT_AGE,
    every_operation,
    lance,
    no_log,
    run_history,
    wal,
)
from support.faults import FaultyFileSystem as NamedFaults

from persisting import fs
from persisting.errors import StorageError

pytestmark = pytest.mark.usefixtures("no_syncs")


def record(number: int) -> dict[str, Any]:
    return {"id": f"r{number}", "n": number, "text": f"words of {number}"}


MORE = (record(100), record(101))


@dataclass(frozen=True)
class Operation:
    """A maintenance operation, and the state it leads to."""

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


OPERATIONS = {
    "compact": Operation(lambda backend: backend.compact()),
    "retain": Operation(lambda backend: backend.retain(rows=2), dropped),
    "tag": Operation(lambda backend: backend.tag("new"), tagged("new")),
    "tag-again": Operation(lambda backend: backend.tag("old"), tagged("old")),
    "delete-tag": Operation(lambda backend: backend.delete_tag("old"), untagged("old")),
    "restore": Operation(lambda backend: backend.restore("old"), restored("old")),
    "create-index": Operation(lambda backend: backend.create_index("text")),
    "create-index-again": Operation(lambda backend: backend.create_index("n", "scalar")),
    "drop-index": Operation(lambda backend: backend.drop_index("n")),
}
SLOW = {"compact", "create-index", "create-index-again"}
UNCERTAIN = {"tag", "tag-again", "delete-tag"}
"""A tag is a file of its own: if its sync fails, the tag may exist or not."""


async def closed_bucket(folder: Path, open_bucket: Open) -> State:
    """Create a closed bucket with fragments, a tag, an index, and rows that the index lacks."""
    handle = CrashableBucket(folder, open_bucket)
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
    """Open a version of the table with Lance itself."""
    import lance as raw

    return raw.dataset(str(folder / "data.lance"), version=version)


def unused_files(folder: Path) -> set[str]:
    """Return the data files that no version uses."""
    used = {
        file.path
        for version in dataset_of(folder).versions()
        for part in dataset_of(folder, version["version"]).get_fragments()
        for file in part.data_files()
    }
    return {path.name for path in (folder / "data.lance" / "data").iterdir()} - used


class WatchedFaults(FaultyFileSystem):
    """Records whether the fault hit a note: a lost note is not an error."""

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


async def check_one_fault(
    folder: Path,
    open_bucket: Open,
    before: State,
    name: str,
    index: int,
    code: int,
    *,
    lasting: bool,
) -> bool:
    """Inject one fault into one operation; return whether it had a call with that number."""
    disk, work = WatchedFaults(), OPERATIONS[name]
    with fs.use(disk):
        handle = CrashableBucket(folder, open_bucket)
    handle.backend.bucket.maintenance.stop()  # the fault must hit the operation
    disk.arm(index, code, lasting=lasting)
    try:
        done = await work.do(handle.backend)
    except StorageError:
        assert disk.fired
        allowed = [before, work.then(before, None)] if name in UNCERTAIN else [before]
        try:
            state = await read_state(handle.backend)
        except StorageError:
            assert lasting  # reads may need files that cannot be opened now
        else:
            check_state(state, allowed)
        disk.heal()
        check_state(await read_state(handle.backend), allowed)
        if name == "compact" and not lasting:  # during a lasting fault they cannot be removed
            assert not unused_files(folder), "the failed compaction left files"
        done = await work.do(handle.backend)
        assert done or name in ("delete-tag", "drop-index")  # the first attempt may have succeeded
    else:
        harmless = disk.fired and (disk.hit_a_note or disk.calls[index] == "remove")
        assert not disk.fired or harmless, f"a failed {disk.calls[index]} was ignored"
        disk.heal()
    after = work.then(before, done)
    check_state(await read_state(handle.backend), [after])
    if name == "drop-index":
        assert not dataset_of(folder).describe_indices(), "the index is still there"
    if index % 3 == 0:
        after = await continue_work(handle.backend, after, list(MORE))
    if not await handle.drop():
        after = after.in_next_epoch()
    handle = CrashableBucket(folder, open_bucket)
    check_state(await read_state(handle.backend), [after])
    await check_health(handle.backend, after.now.rows)
    await handle.backend.close()
    return disk.fired


async def every_fault(
    tmp_path: Path, open_bucket: Open, name: str, error: str, *, lasting: bool, step: int = 1
) -> int:
    """Inject a fault at every ``step``-th call of an operation; return the number of calls."""
    before = await closed_bucket(tmp_path / "source", open_bucket)
    for index in range(0, 10_000, step):
        folder = tmp_path / str(index)
        shutil.copytree(tmp_path / "source", folder)
        try:
            if not await check_one_fault(
                folder, open_bucket, before, name, index, ERRORS[error], lasting=lasting
            ):
                return index
        except Exception as exc:
            raise AssertionError(f"{error} at call {index}: {type(exc).__name__}: {exc}") from exc
        shutil.rmtree(folder)
    raise AssertionError("the fault was hit in every run")


@pytest.mark.parametrize("name", OPERATIONS)
async def test_fault_during_maintenance_raises_and_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    step = 4 if name in SLOW else 2
    assert await every_fault(tmp_path, wal(), name, "EIO", lasting=False, step=step) > 1


async def test_fault_during_version_cleanup_raises_and_changes_nothing(
    tmp_path: Path,
) -> None:
    opener = wal(keep_versions=0.001)
    assert await every_fault(tmp_path, opener, "compact", "EIO", lasting=False, step=7) > 8


@pytest.mark.parametrize(("name", "step"), [("compact", 8), ("restore", 4), ("create-index", 8)])
async def test_lasting_fault_during_maintenance_raises_and_changes_nothing(
    tmp_path: Path, name: str, step: int
) -> None:
    assert await every_fault(tmp_path, no_log(), name, "ENOSPC", lasting=True, step=step) > 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_every_fault_at_every_call_of_maintenance_raises_and_changes_nothing(
    tmp_path: Path, name: str, error: str, lasting: bool
) -> None:
    for number, opener in enumerate((wal(), no_log(), lance(), wal(keep_versions=0.001))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert await every_fault(folder, opener, name, error, lasting=lasting) > 1


# Faults during open and in background maintenance


async def test_fault_during_open_after_a_killed_maintenance_leaves_everything_to_the_next_open(
    tmp_path: Path,
) -> None:
    table = await run_history(tmp_path / "disk", WITH_DEFAULT_AGE, every_operation)
    crash_points = [
        m for m in table.recorder.recording.crash_points if m.label.startswith("before sync_")
    ]
    replay = TableCrashExplorer(table.recorder.recording, table.states, WITH_DEFAULT_AGE, tmp_path)
    for number, point in enumerate(crash_points[:: len(crash_points) // 4]):
        tree, allowed = after_power_loss(point.disk, KEEP_EVERYTHING), replay.allowed(point)
        for index in range(number, 10_000, 9):
            disk, root = FaultyFileSystem(), tmp_path / f"{number}-{index}"
            write_tree(tree, root)
            disk.arm(index, ERRORS["EIO"], lasting=False)
            with fs.use(disk):
                try:
                    handle = CrashableBucket(root / BUCKET, WITH_DEFAULT_AGE)
                except StorageError:
                    assert disk.fired
                else:
                    disk.heal()
                    check_state(await read_state(handle.backend), allowed)
                    await handle.drop()
            handle = CrashableBucket(root / BUCKET, WITH_DEFAULT_AGE)
            state = check_state(await read_state(handle.backend), allowed)
            await check_health(handle.backend, state.now.rows)
            await handle.backend.close()
            shutil.rmtree(root)
            if not disk.fired:
                break
        assert index > 5


class SnapshotPerCall(FaultyFileSystem):
    """Copies a folder before each call: what a kill would leave."""

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


async def test_kill_after_a_rolled_back_compaction_leaves_a_bucket_that_opens(
    tmp_path: Path,
) -> None:
    await kill_after_rollback(tmp_path, "compact", step=4)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_kill_after_any_rolled_back_change_leaves_a_bucket_that_opens(
    tmp_path: Path, name: str
) -> None:
    await kill_after_rollback(tmp_path, name)


async def kill_after_rollback(tmp_path: Path, name: str, step: int = 1) -> None:
    """After the rollback, the next version reuses the number; kill at any call of writing it."""
    await closed_bucket(tmp_path / "source", wal())
    rolled_back = 0
    for index in range(0, 10_000, step):
        disk, folder = SnapshotPerCall(), tmp_path / str(index)
        shutil.copytree(tmp_path / "source", folder)
        with fs.use(disk):
            handle = CrashableBucket(folder, wal())
        disk.arm(index, ERRORS["EIO"], lasting=False)
        with contextlib.suppress(StorageError):
            await OPERATIONS[name].do(handle.backend)
        if not disk.fired:
            break
        if "sync_folder" in disk.calls[index + 1 :]:  # the change was rolled back
            rolled_back += 1
            found = await read_state(handle.backend)
            allowed = [found, replace(found, now=found.now.with_more(record(9)))]
            disk.folder = folder
            await handle.backend.put(record(9))
            await handle.backend.flush()
            disk.folder = None
        await handle.drop()
        for copy in disk.copies[:: 1 + len(disk.copies) // max(2, 6 // step)]:
            handle = CrashableBucket(copy, wal())
            check_state(await read_state(handle.backend), allowed)
            await handle.backend.close()
            shutil.rmtree(copy)
    assert rolled_back or "tag" in name


async def test_failed_background_maintenance_is_reported_and_retried(tmp_path: Path) -> None:
    """In a bucket without a log only maintenance creates files through ``persisting.fs``, so the
    fault does not affect puts."""
    disk = NamedFaults()
    with fs.use(disk):
        backend = no_log()(tmp_path)
    disk.fail_always("create", error=ERRORS["ENOSPC"])
    for number in range(34):
        await backend.put(record(number))
        await backend.flush()
    stats = await stats_when(backend, lambda stats: stats["upkeep_error"] is not None)
    assert "No space left" in stats["upkeep_error"] or "injected" in stats["upkeep_error"]
    assert stats["fragments"] == 34
    assert [row["n"] for row in await backend.get()] == list(range(34))
    disk.heal()
    await backend.put(record(34))
    await backend.flush()
    stats = await stats_when(backend, lambda stats: stats["fragments"] < 34)
    await stats_when(backend, lambda stats: stats["upkeep_error"] is None)
    assert [row["n"] for row in await backend.get()] == list(range(35))
    assert not unused_files(tmp_path)
    await backend.close()
