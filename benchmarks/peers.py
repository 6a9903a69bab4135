"""Compare Persisting with other systems on the same workloads: a table, a JSON file, a page.

    make bench
    .venv/bin/python benchmarks/peers.py --records 20000 --repeat 1
    .venv/bin/python benchmarks/peers.py --only topics --only sqlite --kind small
    .venv/bin/python benchmarks/peers.py --only recovery --only latency

Measures topics through ``write_queue`` in one process, our bare backends, the other systems, and
the floor of the disk: the same bytes written and synced by themselves. In each round all systems
run the workload one after the other in the same folder, so that a busy machine hurts all of them;
the best round of each counts, and the median of the ratios within a round is printed beside it.
What was put is read back and compared. A slow system is stopped after ``--seconds``; its rate is
that of the records stored until then. Systems that are not installed are skipped with a note.

The column "durable" says what survives power loss when a put returns: rates of systems that do not
sync are not comparable with those that do. "recovery" opens a topic whose owner was killed before
any flush; "latency" runs from the call of a put until a reader in another process has the record,
without a cluster. Absolute numbers depend on the machine and its load; compare the ratios.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from corebench import report
from corebench.arguments import BenchParser
from peersbench import registry
from peersbench.comparison import Comparison
from peersbench.peer import Peer
from peersbench.record_kinds import KINDS, Kind, Record
from peersbench.topic_processes import latency, recovery
from peersbench.workload import CROWD, INGEST, PRODUCERS, SINGLES, WARM_UP

PROCESSES = {"recovery": recovery, "latency": latency}
PARTS = (*registry.PEERS, *PROCESSES)


def arguments() -> argparse.Namespace:
    parser = BenchParser(__doc__)
    parser.add_count("--records", 100_000)
    parser.add_repeat()
    parser.add_argument("--seconds", type=float, default=5.0, help="time limit of a measurement")
    parser.add_only(PARTS, "system or question to measure")
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="kind of record; default: all"
    )
    parser.add_folder()
    parser.add_results("JSON and page")
    given = parser.parse_args()
    if given.records < 100 or given.repeat < 1:
        parser.error("--records must be at least 100 and --repeat at least 1")
    return given


def sizes(records: int) -> dict[str, int]:
    """Return the number of records of each workload."""
    return {
        INGEST: records,
        SINGLES: min(records, max(100, records // 100)),
        CROWD: min(records, max(10 * PRODUCERS, records // 10)),
    }


def measure(run: report.Run, outcome: Comparison, kind: Kind, count: int, seconds: float) -> None:
    rows = kind.rows(count + WARM_UP)
    for work, number in sizes(count).items():

        def of(peer: Peer, work: str, some: list[Record]) -> Callable[[Path], float]:
            def measured(folder: Path) -> float:
                found = peer.measure(folder, kind, work, some, seconds)
                for name, value in found.items():
                    outcome.keep(kind, name, peer, value)
                return found[work]

            return measured

        run.best(*(of(peer, work, rows[: number + WARM_UP]) for peer in outcome.peers))


def main() -> None:
    given = arguments()
    parts = given.only or PARTS
    outcome = Comparison(registry.chosen(parts))
    before = report.announce(given.records, given.repeat)
    before["peers"] = {peer.name: peer.version() for peer in outcome.peers}
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = report.Run(given.records, given.repeat, Path(folder))
        for kind in (KINDS[name] for name in given.kind or KINDS if outcome.peers):
            count = max(100, given.records // kind.share)
            measure(run, outcome, kind, count, given.seconds)
            print(outcome.table(kind, count), flush=True)
        outcome.compare_all(run)
        for part in (part for part in PROCESSES if part in parts):
            PROCESSES[part](run)
    if targets := [row for row in run.rows if row.target or row.group in PROCESSES]:
        print(f"\n{report.HEADER}")
        print("\n".join(map(report.line, targets)))
    path = report.write_json(
        run, given.results, before, "peers", rates=outcome.best(), rounds=outcome.rounds
    )
    outcome.draw(path.with_suffix(".html"), before)
    print(f"\nwritten to {path} and {path.with_suffix('.html').name}")


if __name__ == "__main__":
    main()
