"""Us and our peers, given the same work in one run: a table with ratios, a JSON file, a page.

    make bench
    .venv/bin/python benchmarks/peers.py --records 20000 --repeat 1
    .venv/bin/python benchmarks/peers.py --only ours --only sqlite --kind small

Who is not installed is left out, and a line says so. Every work is done by all in turns and the
best of each is kept; what was put is read back and compared. Who is slow is stopped after
``--seconds``: its rate is then that of what it stored until then. The column "durable" says what
survives power loss when a put returns: who does not sync is no like for like. Absolute numbers are
those of this machine at this hour; the ratios are what to compare.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from corebench import report
from peersbench import registry
from peersbench.kinds import KINDS, Kind, Record
from peersbench.outcome import Outcome
from peersbench.peer import Peer
from peersbench.work import CROWD, INGEST, PRODUCERS, SINGLES

RESULTS = Path(__file__).parent / "results"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=100_000, help="default: 100,000")
    parser.add_argument("--repeat", type=int, default=3, help="measure so often, keep the best")
    parser.add_argument("--seconds", type=float, default=5.0, help="at most so long each time")
    parser.add_argument("--only", action="append", choices=registry.PEERS, help="may be repeated")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of record; default: all")
    parser.add_argument("--folder", type=Path, help="where the data goes (default: a temporary)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON and page")
    given = parser.parse_args()
    if given.records < 100 or given.repeat < 1:
        parser.error("--records must be at least 100 and --repeat at least 1")
    return given


def sizes(records: int) -> dict[str, int]:
    """How many records each work takes."""
    return {
        INGEST: records,
        SINGLES: min(records, max(100, records // 100)),
        CROWD: min(records, max(10 * PRODUCERS, records // 10)),
    }


def measure(run: report.Run, outcome: Outcome, kind: Kind, count: int, seconds: float) -> None:
    rows = kind.rows(count)
    for work, wanted in sizes(count).items():

        def of(peer: Peer, work: str, some: list[Record]) -> Callable[[Path], float]:
            def measured(folder: Path) -> float:
                found = peer.measure(folder, kind, work, some, seconds)
                for name, value in found.items():
                    outcome.keep(kind, name, peer, value)
                return found[work]

            return measured

        run.best(*(of(peer, work, rows[:wanted]) for peer in outcome.peers))


def main() -> None:
    given = arguments()
    outcome = Outcome(registry.chosen(given.only))
    before = report.machine()
    before["peers"] = {peer.name: peer.version() for peer in outcome.peers}
    print(f"{given.records:,} records, best of {given.repeat}, load average", end=" ")
    print(", ".join(f"{load:.1f}" for load in before["load_average"]), flush=True)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = report.Run(given.records, given.repeat, Path(folder))
        for kind in (KINDS[name] for name in given.kind or KINDS):
            count = max(100, given.records // kind.share)
            measure(run, outcome, kind, count, given.seconds)
            print(outcome.table(kind, count), flush=True)
    outcome.beside_everyone(run)
    if targets := [row for row in run.rows if row.target is not None]:
        print(f"\n{report.HEADER}")
        print("\n".join(map(report.line, targets)))
    path = report.write_json(run, given.results, before, "peers", rates=outcome.rates)
    outcome.draw(path.with_suffix(".html"), before)
    print(f"\nwritten to {path} and {path.with_suffix('.html').name}")


if __name__ == "__main__":
    main()
