"""Compare work groups with other systems that lease single records to workers.

    .venv/bin/python benchmarks/work.py
    .venv/bin/python benchmarks/work.py --quick --only workers --only redis

64 workers claim one record at a time and acknowledge it before they claim the next one. Both are
durable before the worker continues, as far as the system can do that. The workers are tasks of one
process, then of four processes. In each round all systems run one after the other in the same
folder, so that a busy machine hurts all of them; the best round of each counts, and the median of
the ratios within a round is printed beside it. Every record that was claimed is compared with what
was put, and none may be delivered twice.

"held" lets one worker hold a record while the others continue, beside a topic where nobody does;
"death" kills a process that has leased records, and counts until they come again; "memory" counts
what the keeper of a group allocates for records in flight.

Redis and PostgreSQL come from the machine's packages (``apt-get install redis-server postgresql``),
NATS and the clients with ``.[bench]``. Systems that are not installed are skipped with a note.
Absolute numbers depend on the machine and its load; compare the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from corebench import report
from corebench.arguments import BenchParser
from corebench.report import Run, Target
from peersbench.record_kinds import Record
from workbench import death, held, jetstream_work, memory, postgres_work, redis_work, topic_work
from workbench.crowd import SMALL, WORKERS
from workbench.peer import WorkPeer

PEERS: dict[str, tuple[WorkPeer, ...]] = {
    "topics": topic_work.PEERS,
    "redis": (redis_work.PEER,),
    "postgres": postgres_work.PEERS,
    "jetstream": (jetstream_work.PEER,),
}
QUESTIONS = {"workers": 1, "processes": 4}
"""The number of processes that the workers are in."""
SINGLE = ("held", "death", "memory")


def arguments() -> argparse.Namespace:
    parser = BenchParser(__doc__)
    parser.add_count("--records", 40_000)
    parser.add_quick("4,000 records, each measured once, and a record held for 5 s")
    parser.add_repeat()
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of a measurement")
    parser.add_argument(
        "--hold", type=float, default=60.0, help="seconds that a record is held; default: 60"
    )
    parser.add_only((*QUESTIONS, *SINGLE, *PEERS), "question or system to measure")
    parser.add_folder()
    parser.add_results()
    given = parser.parse_args()
    if given.quick:
        given.records, given.repeat, given.hold = 4_000, 1, 5.0
    if given.records < 1000 or given.repeat < 1:
        parser.error("--records must be at least 1000 and --repeat at least 1")
    return given


def installed(names: list[str]) -> list[WorkPeer]:
    """Return the chosen systems that are installed; print why the others are left out."""
    found = []
    for peer in (peer for name in names for peer in PEERS[name]):
        missing = peer.missing()
        if missing is None:
            found.append(peer)
        else:
            print(f"skipping {peer.name}: {missing}")
    return found


def compare(run: Run, question: str, peers: list[WorkPeer], seconds: float) -> None:
    rows, count = SMALL.rows(run.records), QUESTIONS[question]
    rounds: dict[str, list[float]] = {peer.name: [] for peer in peers}

    def of(peer: WorkPeer, rows: list[Record]) -> Callable[[Path], float]:
        def measured(folder: Path) -> float:
            found = peer.measure(folder, rows, seconds, count)
            rounds[peer.name].append(found)
            return found

        return measured

    best = dict(zip(rounds, run.best(*(of(peer, rows) for peer in peers)), strict=True))
    ours = [peer for peer in peers if peer in topic_work.PEERS]
    others = [peer for peer in peers if peer not in ours]
    where = f"{count} processes" if count > 1 else "1 process"
    for peer in peers:
        run.add(question, f"{peer.name}, {where} ({peer.durable})", best[peer.name], "rec/s")
    for own in ours:
        for other in others:
            ratios = [a / b for a, b in zip(rounds[own.name], rounds[other.name], strict=True)]
            run.add(
                question,
                own.name,
                best[own.name],
                "rec/s",
                other.name,
                best[other.name],
                Target("ratio", at_least=other.target) if other.target else None,
                statistics.median(ratios),
            )


def main() -> None:
    given = arguments()
    chosen = given.only or [*QUESTIONS, *SINGLE, *PEERS]
    questions = [name for name in (*QUESTIONS, *SINGLE) if name in chosen] or list(QUESTIONS)
    names = [name for name in PEERS if name in chosen] or list(PEERS)
    before = report.announce(given.records, given.repeat)
    peers = installed(names) if set(questions) & set(QUESTIONS) else []
    before["peers"] = {peer.name: peer.version() for peer in peers}
    before["workers"] = WORKERS
    print(report.HEADER)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = Run(given.records, given.repeat, Path(folder))
        for question in questions:
            if question in QUESTIONS:
                compare(run, question, peers, given.seconds)
            elif question == "held":
                held.measure(run, given.hold)
            elif question == "death":
                death.measure(run)
            else:
                memory.measure(run)
    print(f"\nwritten to {report.write_json(run, given.results, before, 'work')}")


if __name__ == "__main__":
    main()
