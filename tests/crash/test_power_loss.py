"""Power loss at every file call: exactly the acknowledged records survive, once and in order.

Every crash point is replayed with all unsynced changes lost, kept, partly kept (names without
bytes, zeros, removals undone), and with random subsets and torn sectors. Each state is opened,
checked, written to, dropped, opened and checked again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crash import workloads
from support.crash.checks import CrashExplorer, Open
from support.crash.density import every_nth_unless_nightly
from support.crash.workloads import Durable, RecordedWriter, Workload, lance, no_log, wal

LOGGED = {
    "singles_and_batches": workloads.singles_and_batches,
    "concurrent_puts": workloads.concurrent_puts,
    "puts_during_a_flush": workloads.puts_during_a_flush,
    "evolution": workloads.evolution,
    "kills_and_recoveries": workloads.kills_and_recoveries,
}


def named(**cases: Open) -> list[object]:
    return [pytest.param(opener, id=name) for name, opener in cases.items()]


async def check_power_loss(
    tmp_path: Path,
    open_bucket: Open,
    workload: Workload,
    durable: Durable = Durable.ACKNOWLEDGED,
    *,
    afterwards: Open | None = None,
    samples: int = 1,
    every: int = 1,
) -> RecordedWriter:
    """Record a workload, then check the states that power loss may leave at every crash point, or
    at one of ``every``."""
    disk, workspace = tmp_path / "disk", tmp_path / "states"
    disk.mkdir()
    workspace.mkdir()
    writer = RecordedWriter(disk, open_bucket, durable)
    await workload(writer)
    recording = writer.recorder.recording
    explorer = CrashExplorer(
        recording, writer.expected, afterwards or open_bucket, workspace, samples=samples
    )
    await explorer.explore(recording.crash_points[::every])
    assert explorer.checked > 40 / every
    print(f"{explorer.checked} states of {len(recording.crash_points)} crash_points")
    return writer


@every_nth_unless_nightly(3)
@pytest.mark.parametrize("workload", LOGGED.values(), ids=LOGGED)
async def test_acknowledged_record_survives_power_loss(
    tmp_path: Path, workload: Workload, every: int
) -> None:
    await check_power_loss(tmp_path, wal(), workload, every=every)


@every_nth_unless_nightly(3)
async def test_acknowledged_compressed_record_survives_power_loss(
    tmp_path: Path, every: int
) -> None:
    async def workload(writer: RecordedWriter) -> None:
        await writer.put(text="a long text " * 60)
        await writer.flush()
        await writer.batch(2, text="another text " * 60)
        await writer.close()

    await check_power_loss(tmp_path, wal(compression="zstd"), workload, every=every)


@every_nth_unless_nightly(3)
async def test_constantly_flushed_log_survives_power_loss(tmp_path: Path, every: int) -> None:
    opener = wal(max_wal_size=900, flush_threshold=4)
    await check_power_loss(tmp_path, opener, workloads.many_small_flushes, every=every)


@every_nth_unless_nightly(3)
async def test_field_with_a_default_survives_power_loss(tmp_path: Path, every: int) -> None:
    opener = wal(schema_defaults={"age": 7})
    await check_power_loss(tmp_path, opener, workloads.a_field_with_a_default, every=every)


@every_nth_unless_nightly(3)
async def test_change_of_compression_survives_power_loss(tmp_path: Path, every: int) -> None:
    workload = workloads.other_options(wal(compression="zstd"), wal(compression="snappy"))
    await check_power_loss(
        tmp_path, wal(), workload, afterwards=wal(compression="lz4"), every=every
    )


@every_nth_unless_nightly(3)
async def test_enabling_and_disabling_the_log_survives_power_loss(
    tmp_path: Path, every: int
) -> None:
    workload = workloads.other_options(wal(), no_log(), wal())
    await check_power_loss(
        tmp_path, lance(), workload, Durable.FLUSHED, afterwards=wal(), every=every
    )


@every_nth_unless_nightly(3)
@pytest.mark.parametrize("open_bucket", named(lance=lance(), no_log=no_log()))
async def test_flushed_record_survives_power_loss_without_a_log(
    tmp_path: Path, open_bucket: Open, every: int
) -> None:
    await check_power_loss(
        tmp_path, open_bucket, workloads.flushes_without_a_log, Durable.FLUSHED, every=every
    )


@every_nth_unless_nightly(3)
async def test_flushed_record_survives_power_loss_during_evolution_without_a_log(
    tmp_path: Path, every: int
) -> None:
    await check_power_loss(tmp_path, no_log(), workloads.evolution, Durable.FLUSHED, every=every)


@every_nth_unless_nightly(3)
async def test_power_loss_with_a_sync_interval_leaves_a_prefix_with_all_synced_records(
    tmp_path: Path, every: int
) -> None:
    async def workload(writer: RecordedWriter) -> None:
        for step in range(8):
            await writer.put(v=1)
            if step == 2:
                await writer.synced()
            if step in (4, 6):
                await writer.flush()
        await writer.synced()
        await writer.close()

    opener = wal(wal_sync_interval=0.04)
    await check_power_loss(tmp_path, opener, workload, Durable.SYNCED, samples=3, every=every)


async def test_acknowledged_records_become_durable_within_the_sync_interval(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    writer = RecordedWriter(disk, wal(wal_sync_interval=0.05), Durable.SYNCED)
    for _ in range(3):
        await writer.put()
        await writer.together(3)
        await writer.synced()
    await writer.close()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(12))
async def test_random_workload_survives_power_loss(tmp_path: Path, seed: int) -> None:
    opener = wal(compression=(None, "zstd", "lz4", "snappy")[seed % 4], flush_threshold=7)
    await check_power_loss(tmp_path, opener, workloads.random_workload(seed, 40), samples=6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
async def test_power_loss_in_a_random_workload_with_a_sync_interval_leaves_a_prefix(
    tmp_path: Path, seed: int
) -> None:
    opener = wal(wal_sync_interval=0.005, flush_threshold=9)
    workload = workloads.random_workload(300 + seed, 40)
    await check_power_loss(tmp_path, opener, workload, Durable.SYNCED, samples=6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
async def test_random_workload_without_a_log_survives_power_loss(tmp_path: Path, seed: int) -> None:
    workload = workloads.random_workload(100 + seed, 40)
    await check_power_loss(tmp_path, no_log(), workload, Durable.FLUSHED, samples=6)
