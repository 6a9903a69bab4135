"""A failed sync: the kernel may have given the pages up, and the next sync of the file succeeds.

Nothing may be acknowledged on the strength of that later sync.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.crash.checking import BUCKET, Handle, Open, Story, check_folder
from support.crash.disk import FIXED, NOTHING, Disk, after_power_loss, lay_out, sampled
from support.crash.recording import Moment, RecordingFileSystem
from support.crash.workloads import lance, no_log, wal

from persisting import fs
from persisting.errors import StorageError


class ForgetfulDisk(Disk):
    """What was dirty when a sync failed is clean afterwards, and not on the disk."""

    def __init__(self, root: Path) -> None:
        self._given_up: dict[int, list[tuple[int, int]]] = {}
        super().__init__(root)

    def give_up(self, path: Path) -> None:
        file = self._find(path)
        assert file is not None
        known = file.durable or b""
        same = next(
            (i for i, (a, b) in enumerate(zip(known, file.data, strict=False)) if a != b),
            min(len(known), len(file.data)),
        )
        self._given_up.setdefault(file.number, []).append((same, len(file.data)))

    def sync_file(self, path: Path) -> None:
        file = self._find(path)
        super().sync_file(path)
        if file is not None and file.durable is not None:
            kept = bytearray(file.durable)
            for start, end in self._given_up.get(file.number, []):
                kept[start:end] = bytes(len(kept[start:end]))
            file.durable = bytes(kept)


class FailingSyncs(RecordingFileSystem):
    """The sync with a given number fails; folders keep their entries unsynced then."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.disk: ForgetfulDisk = ForgetfulDisk(root)
        self.index: int | None = None
        self.lasting = False
        self.syncs = 0

    def _fails(self) -> bool:
        self.syncs += 1
        if self.index is None or self.syncs <= self.index:
            return False
        return self.lasting or self.syncs - 1 == self.index

    def remove(self, path: Path) -> None:
        """While a fault lasts, nothing can be removed either."""
        if self.lasting and self.index is not None and self.syncs > self.index:
            raise OSError(errno.EIO, "Input/output error")
        super().remove(path)

    def sync(self, fd: int) -> None:
        self._sync(
            Path(f"/proc/self/fd/{fd}").readlink(), lambda: RecordingFileSystem.sync(self, fd)
        )

    def sync_file(self, path: Path) -> None:
        self._sync(path, lambda: RecordingFileSystem.sync_file(self, path))

    def _sync(self, path: Path, real: Any) -> None:
        with self.guard:
            if self._fails():
                self.disk.observe()
                self.disk.give_up(path)
                raise OSError(errno.EIO, "Input/output error")
            real()

    def sync_folder(self, path: Path) -> None:
        with self.guard:
            if self._fails():
                raise OSError(errno.EIO, "Input/output error")
            super().sync_folder(path)


async def run(root: Path, open_bucket: Open, index: int, logged: bool) -> tuple[Any, Story, bool]:
    """Puts and flushes with one failing sync, each tried again; what was promised when."""
    disk = FailingSyncs(root)
    with fs.use(disk):
        handle = Handle(root / BUCKET, open_bucket)
        disk.index, disk.syncs = index, 0
        story = Story()
        for number in range(6):
            record = {"id": f"r{number}", "n": number}
            try:
                await handle.backend.put(record)
            except StorageError:
                await handle.backend.put(record)
            story.tell(record)
            if logged:
                disk.promise(record["id"])
            if number in (1, 3):
                try:
                    await handle.backend.flush()
                except StorageError:
                    await handle.backend.flush()
                disk.promise(record["id"])
        fired = disk.syncs > index
        try:
            await handle.backend.close()
        except StorageError:
            await handle.backend.close()
        disk.promise(record["id"])
    return disk.recording, story, fired


async def check_promises(tmp_path: Path, recording: Any, story: Story, open_bucket: Open) -> None:
    """Nothing unsynced survives; look at every moment at which something was promised."""
    promises: list[Moment] = [m for m in recording.moments if m.label.startswith("promised")]
    for moment in promises:
        least = max(map(story.position, recording.promises[: moment.promised]))
        root = tmp_path / "lost"
        lay_out(after_power_loss(moment.disk, NOTHING), root)
        await check_folder(root / BUCKET, open_bucket, story, least)
        shutil.rmtree(root)


@pytest.mark.parametrize(
    ("open_bucket", "logged"),
    [
        pytest.param(wal(), True, id="wal"),
        pytest.param(no_log(), False, id="no_log"),
        pytest.param(lance(), False, id="lance"),
    ],
)
async def test_nothing_is_promised_on_the_strength_of_a_sync_after_a_failed_one(
    tmp_path: Path, open_bucket: Open, logged: bool
) -> None:
    for index in range(1000):
        root = tmp_path / str(index)
        root.mkdir()
        recording, story, fired = await run(root, open_bucket, index, logged)
        if not fired:
            assert index > 15
            return
        try:
            await check_promises(tmp_path, recording, story, open_bucket)
        except Exception as exc:
            raise AssertionError(f"sync {index} failed: {exc}") from exc
    raise AssertionError("the run never ended")


async def test_an_opening_that_fails_half_way_does_not_call_the_bucket_clean(
    tmp_path: Path,
) -> None:
    """Another compression is a new version; if it cannot be synced or removed, it may be torn."""
    for index in range(1000):
        root = tmp_path / str(index)
        root.mkdir()
        disk = FailingSyncs(root)
        story = Story()
        story.tell({"id": "r0", "n": 0})
        with fs.use(disk):
            handle = Handle(root / BUCKET, wal())
            await handle.backend.put(story.records[0])
            await handle.backend.close()
            disk.index, disk.syncs, disk.lasting = index, 0, True
            try:
                handle.open(wal(compression="zstd"))
            except StorageError:
                opened = False
            else:
                opened = True
                await handle.drop()
            disk.index = None
            disk.disk.observe()
        for loss in (*FIXED, sampled(index)):
            lost = tmp_path / "lost"
            lay_out(after_power_loss(disk.disk.freeze(), loss), lost)
            try:
                await check_folder(lost / BUCKET, wal(), story, 1)
            except Exception as exc:
                raise AssertionError(f"from sync {index} on, {loss}: {exc}") from exc
            shutil.rmtree(lost)
        if opened:
            assert index > 5
            return
    raise AssertionError("the opening never ended")


async def test_a_forgetful_disk_would_be_noticed(tmp_path: Path) -> None:
    """The model itself: a second sync does not bring back what the first one gave up."""
    disk = ForgetfulDisk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(b"given up")
    disk.observe()
    disk.sync_folder(tmp_path)
    disk.give_up(path)
    path.write_bytes(b"given up, then more")
    disk.observe()
    disk.sync_file(path)
    left = after_power_loss(disk.freeze(), NOTHING)
    assert left[Path("file")] == bytes(8) + b", then more"
