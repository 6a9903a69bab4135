"""The measured rates as a table, as rows that compare ours with each other, and as a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from corebench.report import Row, Run, Target

from peersbench import topic_store
from peersbench.peer import Peer
from peersbench.record_kinds import KINDS, Kind
from peersbench.registry import TARGETS, YARDSTICK
from peersbench.workload import TITLES
from persisting.demo.report_charts import Series, page


@dataclass
class Comparison:
    """Records per second of every system, for each kind of record and each workload."""

    peers: list[Peer]
    rounds: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """By kind of record, workload and system."""

    def keep(self, kind: Kind, work: str, peer: Peer, found: float) -> None:
        of_work = self.rounds.setdefault(kind.name, {}).setdefault(work, {})
        of_work.setdefault(peer.name, []).append(found)

    def best(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the best round, by kind of record, workload and system."""
        return {
            kind: {
                work: {name: max(rates) for name, rates in of_work.items()}
                for work, of_work in works.items()
            }
            for kind, works in self.rounds.items()
        }

    def table(self, kind: Kind, count: int) -> str:
        """Format the best rates and their ratios to SQLite."""
        rates = self.best()[kind.name]
        titles = "".join(f"{TITLES[work]:>31}" for work in TITLES)
        lines = [f"\n{kind.title}, {count:,} records; rec/s and ratio to {YARDSTICK}"]
        lines += [f"{'':20}{'durable':28}{titles}"]
        for peer in self.peers:
            cells = "".join(_cell(rates[work], peer.name) for work in TITLES)
            lines.append(f"{peer.name:20}{peer.durability:28}{cells}".rstrip())
        return "\n".join(lines)

    def compare_all(self, run: Run) -> None:
        """Add a row for each of ours compared with each other system, and for each target."""
        ours = {peer.name for peer in self.peers if peer.ours}
        for kind, works in self.rounds.items():
            for work, rounds in works.items():
                for name in (name for name in rounds if name in ours):
                    for other in rounds:
                        least = TARGETS.get((work, name, other)) if kind == "small" else None
                        if other not in ours or least is not None:
                            target = None if least is None else Target("ratio", at_least=least)
                            title = f"{name}: {TITLES[work]}"
                            run.rows.append(_row(kind, title, other, rounds, name, target))

    def draw(self, path: Path, machine: dict[str, object]) -> None:
        """Write a self-contained page with charts."""
        facts = [(name, str(machine[name])) for name in ("time", "system", "cpus", "load_average")]
        facts += [
            (peer.name, ", ".join(filter(None, (peer.version(), peer.durability))))
            for peer in self.peers
        ]
        charts = []
        for kind, works in self.best().items():
            for work, rates in works.items():
                names, values = list(rates), list(rates.values())
                title = f"{KINDS[kind].title}: {TITLES[work]}, rec/s"
                marked = names.index(_MARKED) if _MARKED in names else None
                charts.append(Series(title, "rec/s", names, values, marked))
        page(path, "Persisting compared with its peers", facts, charts)


_MARKED = topic_store.FOUR.name


def _row(
    kind: str,
    title: str,
    other: str,
    rounds: dict[str, list[float]],
    name: str,
    target: Target | None,
) -> Row:
    """Compare the best rounds; add the median of the ratios within a round."""
    found, theirs = rounds[name], rounds[other]
    ratio = median(a / b for a, b in zip(found, theirs, strict=True))
    return Row(kind, title, max(found), "rec/s", other, max(theirs), target, ratio)


def _cell(rates: dict[str, float], name: str) -> str:
    if name not in rates:
        return " " * 31
    beside = rates.get(YARDSTICK)
    ratio = f"{rates[name] / beside:.2f}x" if beside else ""
    return f"{rates[name]:>21,.0f}{ratio:>10}"
