"""Power loss at every file call: what was acknowledged is there, once, in order, and nothing else.

Every recorded moment is replayed with all unsynced work lost, kept, half kept (names without
bytes, zeros, removals undone) and with sampled subsets and torn sectors of it. Each state is
opened, checked, written to, dropped, opened and checked again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crash import workloads
from support.crash.checking import Explorer, Open
from support.crash.workloads import Durable, Scribe, Workload, lance, no_log, wal

LOGGED = {
    "singles_and_batches": workloads.singles_and_batches,
    "concurrent_puts": workloads.concurrent_puts,
    "puts_beside_a_flush": workloads.puts_beside_a_flush,
    "evolution": workloads.evolution,
    "kills_and_recoveries": workloads.kills_and_recoveries,
}


def named(**cases: Open) -> list[object]:
    return [pytest.param(opener, id=name) for name, opener in cases.items()]


async def explored(
    tmp_path: Path,
    open_bucket: Open,
    workload: Workload,
    durable: Durable = Durable.ACKNOWLEDGED,
    *,
    afterwards: Open | None = None,
    samples: int = 1,
) -> Scribe:
    """Record a workload, then check every state that power loss may leave of it."""
    disk, workspace = tmp_path / "disk", tmp_path / "states"
    disk.mkdir()
    workspace.mkdir()
    scribe = Scribe(disk, open_bucket, durable)
    await workload(scribe)
    recording = scribe.recorder.recording
    explorer = Explorer(
        recording, scribe.story, afterwards or open_bucket, workspace, samples=samples
    )
    await explorer.explore()
    assert explorer.checked > 40
    print(f"{explorer.checked} states of {len(recording.moments)} moments")
    return scribe


@pytest.mark.parametrize("workload", LOGGED.values(), ids=LOGGED)
async def test_an_acknowledged_record_survives_power_loss(
    tmp_path: Path, workload: Workload
) -> None:
    await explored(tmp_path, wal(), workload)


async def test_an_acknowledged_compressed_record_survives_power_loss(tmp_path: Path) -> None:
    async def workload(scribe: Scribe) -> None:
        await scribe.put(text="a long text " * 60)
        await scribe.flush()
        await scribe.batch(2, text="another text " * 60)
        await scribe.close()

    await explored(tmp_path, wal(compression="zstd"), workload)


async def test_a_log_that_is_flushed_all_the_time_loses_nothing(tmp_path: Path) -> None:
    opener = wal(max_wal_size=900, flush_threshold=4)
    await explored(tmp_path, opener, workloads.many_small_flushes)


async def test_a_field_with_a_default_survives_power_loss(tmp_path: Path) -> None:
    opener = wal(schema_defaults={"age": 7})
    await explored(tmp_path, opener, workloads.a_field_with_a_default)


async def test_another_compression_survives_power_loss(tmp_path: Path) -> None:
    workload = workloads.other_options(wal(compression="zstd"), wal(compression="snappy"))
    await explored(tmp_path, wal(), workload, afterwards=wal(compression="lz4"))


async def test_switching_the_log_on_and_off_survives_power_loss(tmp_path: Path) -> None:
    workload = workloads.other_options(wal(), no_log(), wal())
    await explored(tmp_path, lance(), workload, Durable.FLUSHED, afterwards=wal())


@pytest.mark.parametrize("open_bucket", named(lance=lance(), no_log=no_log()))
async def test_a_flushed_record_survives_power_loss_without_a_log(
    tmp_path: Path, open_bucket: Open
) -> None:
    await explored(tmp_path, open_bucket, workloads.flushes_without_a_log, Durable.FLUSHED)


async def test_a_flushed_record_survives_power_loss_while_the_schema_changes_without_a_log(
    tmp_path: Path,
) -> None:
    await explored(tmp_path, no_log(), workloads.evolution, Durable.FLUSHED)


async def test_with_an_interval_power_loss_leaves_a_beginning_with_all_that_was_synced(
    tmp_path: Path,
) -> None:
    async def workload(scribe: Scribe) -> None:
        for step in range(8):
            await scribe.put(v=1)
            if step == 2:
                await scribe.synced()
            if step in (4, 6):
                await scribe.flush()
        await scribe.synced()
        await scribe.close()

    opener = wal(wal_sync_interval=0.04)
    await explored(tmp_path, opener, workload, Durable.SYNCED, samples=3)


async def test_an_interval_of_silence_makes_everything_acknowledged_durable(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    scribe = Scribe(disk, wal(wal_sync_interval=0.05), Durable.SYNCED)
    for _ in range(3):
        await scribe.put()
        await scribe.together(3)
        await scribe.synced()
    await scribe.close()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(12))
async def test_a_random_history_survives_power_loss(tmp_path: Path, seed: int) -> None:
    opener = wal(compression=(None, "zstd", "lz4", "snappy")[seed % 4], flush_threshold=7)
    await explored(tmp_path, opener, workloads.anything(seed, 40), samples=6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
async def test_a_random_history_with_an_interval_leaves_a_beginning(
    tmp_path: Path, seed: int
) -> None:
    opener = wal(wal_sync_interval=0.005, flush_threshold=9)
    workload = workloads.anything(300 + seed, 40)
    await explored(tmp_path, opener, workload, Durable.SYNCED, samples=6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
async def test_a_random_history_without_a_log_survives_power_loss(
    tmp_path: Path, seed: int
) -> None:
    workload = workloads.anything(100 + seed, 40)
    await explored(tmp_path, no_log(), workload, Durable.FLUSHED, samples=6)
