"""Ctrl-C ends every command with 130, and acknowledged records stay stored."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.cli_runner import Answer, line_of, started, stopped

LINES = b"".join(b'{"id": "k%d", "n": %d}\n' % (n, n) for n in range(5000))
BACKENDS = {
    "synced log": [],
    "log synced later": ["--set", "wal_sync_interval=600", "--set", "flush_interval=null"],
    "no log": ["--set", "enable_wal=false", "--set", "flush_interval=null"],
    "lance": ["--backend", "lance"],
}


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_ctrl_c_in_a_put_with_unflushed_records_counts_what_is_stored(
    options: list[str], tmp_path: Path, call: Callable[..., Answer]
) -> None:
    with started("put", "t", "--buckets", 2, *options, "-s", tmp_path) as child:
        assert child.stdin is not None
        child.stdin.write(LINES)
        child.stdin.flush()
        _until(lambda: (tmp_path / "t" / "topic.json").exists())
        time.sleep(0.3)  # likely, but not necessarily, puts records before the interrupt
        code, out, err = stopped(child)
    assert (code, err.splitlines()[-1]) == (130, "stopped")
    acknowledged = int(out.split()[0].replace(",", "")) if out else 0
    exported = call("export", "t", "-", "-c", "n", "-s", tmp_path)
    numbers = [json.loads(line)["n"] for line in exported.out.splitlines()]
    assert len(numbers) == len(set(numbers)) == acknowledged
    assert ("--write-id put-" in err) == (acknowledged > 0)


@pytest.mark.parametrize("options", [[], ["--set", "enable_wal=false"]], ids=["log", "no log"])
def test_repeated_ctrl_c_still_exits_with_130(options: list[str], tmp_path: Path) -> None:
    with started("put", "t", *options, "-s", tmp_path) as child:
        assert child.stdin is not None
        child.stdin.write(LINES)
        child.stdin.flush()
        _until(lambda: (tmp_path / "t" / "topic.json").exists())
        child.send_signal(signal.SIGINT)
        while line_of(child.stderr) != "stopped":
            pass
        assert _interrupted_until_it_ends(child) == 130
        assert b"Traceback" not in child.stderr.read()


def test_ctrl_c_stops_bench_and_removes_its_folder(tmp_path: Path) -> None:
    with started("bench", "-n", 1_000_000, "--folder", tmp_path) as child:
        _until(lambda: any(tmp_path.glob("persisting-bench-*/synced/**/*.wal")))
        code, out, err = stopped(child)
    assert (code, out, err.strip()) == (130, "", "stopped")
    assert list(tmp_path.iterdir()) == []


def _interrupted_until_it_ends(child: subprocess.Popen[bytes]) -> int:
    """Send SIGINT again and again while the interpreter exits; return the exit code."""
    for _ in range(3000):
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return child.wait(0.01)
    raise AssertionError("the command did not end")


def _until(reached: Callable[[], bool]) -> None:
    for _ in range(6000):
        if reached():
            return
        time.sleep(0.005)
    raise AssertionError("the command did not get there")
