"""Benchmarks of reads for training, compared with lancedb, HF datasets, MosaicML and torchrl.

    make bench-torch
    .venv-torch/bin/python benchmarks/training.py --quick
    .venv-torch/bin/python benchmarks/training.py --only replay
    .venv-torch/bin/python benchmarks/training.py --only first --large 10000000

``make bench-torch`` installs the peers into .venv-torch. mosaicml-streaming needs older versions of
some packages, and so an environment of its own: ``--mosaic-python`` names its interpreter.

    python -m venv .venv-mosaic && .venv-mosaic/bin/pip install mosaicml-streaming pyarrow
    .venv-torch/bin/python benchmarks/training.py --mosaic-python .venv-mosaic/bin/python

A peer that is not installed is left out, and the output says so. Each reader runs in a process of
its own, and the systems take turns. Absolute numbers depend on the machine and its load; compare
the ratios. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from corebench import report
from corebench.arguments import BenchParser
from corebench.report import Run, Target
from trainingbench import replay, rows, stops, streams

MODULES = {"lancedb": "lancedb", "HF": "datasets", "mosaicml-streaming": "streaming"}
_SETTLED_ROWS = 500_000
_MOST_GROWTH = 64
"""After this many rows a reader's memory must not grow by more than this many MiB."""
_MEMORY_ROWS = 2_000_000
_READERS = {
    "ours": streams.ours,
    "ours, as tensors": streams.ours_torch,
    **{name: read for name, (_, read) in streams.PEERS.items()},
}


def shuffled(run: Run, given: argparse.Namespace) -> None:
    """Rows per second of a shuffled epoch, and how memory grows while it is read."""
    folders = {"ours": rows.store_topic(run.folder / "ours", run.records)}
    folders["ours, as tensors"] = folders["ours"]
    stored: dict[object, Path] = {}
    for name, (store, _) in streams.PEERS.items():
        if not _is_installed(name, given.mosaic_python):
            print(f"{name}: not installed, left out")
            continue
        if store not in stored:
            stored[store] = run.folder / f"peer-{len(stored)}"
            in_process(name, stored[store], "--store", run.records, given.mosaic_python)
        folders[name] = stored[store]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(run.repeat):
        for name, folder in folders.items():
            found[name].append(in_process(name, folder, "--read", 0, given.mosaic_python))
    best = {name: max(result["rate"] for result in results) for name, results in found.items()}
    cpu = {name: max(result["cpu_rate"] for result in results) for name, results in found.items()}
    peers = {name: rate for name, rate in best.items() if name in streams.SHUFFLES_ROWS}
    fastest = max(peers, key=lambda name: peers[name], default=None)
    for name in folders:
        if name != "ours":
            target = Target("ratio", at_least=1.5) if name == fastest else None
            run.add(
                "shuffled", "rows of an epoch", best["ours"], "rows/s", name, best[name], target
            )
    for name in folders:
        if name != "ours":
            run.add("shuffled", "rows per second of CPU", cpu["ours"], "rows/s", name, cpu[name])
    if run.records >= 2 * _SETTLED_ROWS:
        add_memory(run, found["ours"], run.records)


def first_batch(run: Run, given: argparse.Namespace) -> None:
    """Seconds from the creation of a stream of many rows to its first batch."""
    topic = rows.store_topic(run.folder / "large", given.large)
    results = [in_process("ours", topic, "--read", 1) for _ in range(run.repeat)]
    seconds = min(result["first"] for result in results)
    name = f"first batch of {given.large:,} rows"
    run.add("first batch", name, seconds, "s", target=Target("value", at_most=0.5))
    if given.large >= 2 * _SETTLED_ROWS:
        batches = min(given.large, _MEMORY_ROWS) // rows.BATCH
        add_memory(run, [in_process("ours", topic, "--read", batches)], given.large)


def add_memory(run: Run, results: list[dict[str, float]], count: int) -> None:
    """Add how much memory a reader of ``count`` rows takes at most, and how that grows."""
    peak = min(result["peak"] for result in results)
    growth = min(result["growth"] for result in results)
    run.add("memory", f"most, reading from {count:,} rows", peak, "MiB")
    name = f"growth after the first {_SETTLED_ROWS:,} rows"
    run.add("memory", name, growth, "MiB", target=Target("value", at_most=_MOST_GROWTH))


def prioritized(run: Run, given: argparse.Namespace) -> None:
    """Batches per second by priority, each with an update of its priorities."""
    topic = rows.store_topic(run.folder / "replay", run.records)
    (run.folder / "cache").mkdir()
    ours = replay.ours(topic, run.folder / "cache")
    peer, name = replay.torchrl, "torchrl, memmap storage"
    if not replay.has_torchrl():
        print("torchrl cannot be loaded with this version of torch: compared with a NumPy sum tree")
        peer, name = replay.numpy_memmap, "NumPy sum tree over memmap"
    theirs = peer(run.folder / "peer", run.records)
    rates = [replay.rates([ours, theirs]) for _ in range(run.repeat)]
    run.add(
        "replay",
        f"batches of {rows.BATCH}, by priority",
        max(own for own, _ in rates),
        "1/s",
        name,
        max(peer_rate for _, peer_rate in rates),
        Target("ratio", at_least=0.5),
        statistics.median(own / other for own, other in rates),
    )


def stopped(run: Run, given: argparse.Namespace) -> None:
    """Stop and resume with changing ranks and workers; count rows that are missing or twice."""
    topic = rows.store_topic(run.folder / "stops", 2000)
    missing, twice = stops.run(topic, given.stops)
    for name, value in (("missing", missing), ("twice", twice)):
        run.add(
            "stops",
            f"rows {name} over {given.stops} stops",
            value,
            "rows",
            target=Target("value", at_most=0),
        )


SUITES = {
    "shuffled": shuffled,
    "first": first_batch,
    "replay": prioritized,
    "stops": stopped,
}


def _is_installed(name: str, mosaic_python: str | None) -> bool:
    if name == streams.MOSAIC and mosaic_python is not None:
        return True
    module = MODULES[name.split(",")[0].split()[0]]
    return importlib.util.find_spec(module) is not None


def in_process(
    name: str, folder: Path, what: str, count: int, mosaic_python: str | None = None
) -> dict[str, float]:
    """Store or read in a new process, so that no system profits or suffers from another."""
    python = sys.executable
    if name == streams.MOSAIC and mosaic_python is not None:
        python = mosaic_python
    command = [python, __file__, what, name, str(folder), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1]) if what == "--read" else {}
    return result


def read(name: str, folder: Path, batches: int) -> None:
    """Read in this process and print what was measured."""
    for module in streams.IMPORTED[name]:  # which is not what is measured
        importlib.import_module(module)
    started, cpu_started = time.perf_counter(), time.process_time()
    first, count, settled = 0.0, 0, 0
    for number, length in enumerate(_READERS[name](folder), 1):
        first = first or time.perf_counter() - started
        count += length
        if number == batches:
            break
        if count >= _SETTLED_ROWS and not settled:
            settled = _memory()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    peak = _memory()
    result = {
        "first": first,
        "rate": count / seconds,
        "cpu_rate": count / cpu,
        "growth": (peak - settled) / 1024 if settled else 0.0,
        "peak": peak / 1024,
        "rows": count,
    }
    print(json.dumps(result))


def _memory() -> int:
    """Return the most memory that this process has used, in KiB.

    On Linux the usage that ``getrusage`` returns begins with that of the process that started this
    one, which may have been much larger.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = (line.split() for line in status.read_text().splitlines())
        return next(int(line[1]) for line in lines if line[0] == "VmHWM:")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def arguments() -> argparse.Namespace:
    parser = BenchParser(__doc__)
    parser.add_count("--records", 1_000_000)
    parser.add_count("--large", 10_000_000)
    parser.add_count("--stops", 1000)
    parser.add_argument("--mosaic-python", help="an interpreter that has mosaicml-streaming")
    parser.add_quick("20,000 rows, 50,000 for the first batch, 10 stops, each measured once")
    parser.add_repeat()
    parser.add_only(SUITES)
    parser.add_folder()
    parser.add_results()
    given = parser.parse_args()
    if given.quick:
        given.records, given.large, given.stops, given.repeat = 20_000, 50_000, 10, 1
    return given


def main() -> None:
    given = arguments()
    before = report.announce(given.records, given.repeat)
    print(report.HEADER)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = Run(given.records, given.repeat, Path(folder))
        for name in given.only or SUITES:
            SUITES[name](run, given)
    print(f"\nwritten to {report.write_json(run, given.results, before, 'training')}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--store"]:
        streams.PEERS[sys.argv[2]][0](Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
