"""The measured rates as a table, as rows that compare ours with each other, and as a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from corebench.report import Row, Run, Target

from peersbench import persisting_store
from peersbench.peer import Peer
from peersbench.record_kinds import KINDS, Kind
from peersbench.registry import TARGETS, YARDSTICK
from peersbench.workload import TITLES
from persisting.demo.charts import Series, page

_OURS = tuple(
    peer.name
    for peer in (persisting_store.SYNCED, persisting_store.DEFAULT, persisting_store.UNLOGGED)
)


@dataclass
class Comparison:
    """Records per second of every system, for each kind of record and each workload."""

    peers: list[Peer]
    rates: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """By kind of record, workload and system."""

    def keep(self, kind: Kind, work: str, peer: Peer, found: float) -> None:
        of_work = self.rates.setdefault(kind.name, {}).setdefault(work, {})
        of_work[peer.name] = max(found, of_work.get(peer.name, 0.0))

    def table(self, kind: Kind, count: int) -> str:
        """Format the rates and their ratios to SQLite."""
        rates = self.rates[kind.name]
        titles = "".join(f"{TITLES[work]:>31}" for work in TITLES)
        lines = [f"\n{kind.title}, {count:,} records; rec/s and ratio to {YARDSTICK}"]
        lines += [f"{'':16}{'durable':28}{titles}"]
        for peer in self.peers:
            cells = "".join(_cell(rates[work], peer.name) for work in TITLES)
            lines.append(f"{peer.name:16}{peer.durability:28}{cells}")
        return "\n".join(lines)

    def compare_all(self, run: Run) -> None:
        """Add a row for each of our backends compared with each other system."""
        for kind, works in self.rates.items():
            for work, rates in works.items():
                for name in (name for name in _OURS if name in rates):
                    for other in (other for other in rates if other not in _OURS):
                        least = TARGETS.get((work, name, other)) if kind == "small" else None
                        target = None if least is None else Target("ratio", at_least=least)
                        title = f"{name}: {TITLES[work]}"
                        run.rows.append(
                            Row(kind, title, rates[name], "rec/s", other, rates[other], target)
                        )

    def draw(self, path: Path, machine: dict[str, object]) -> None:
        """Write a self-contained page with charts."""
        facts = [(name, str(machine[name])) for name in ("time", "system", "cpus", "load_average")]
        facts += [
            (peer.name, ", ".join(filter(None, (peer.version(), peer.durability))))
            for peer in self.peers
        ]
        charts = []
        for kind, works in self.rates.items():
            for work, rates in works.items():
                names = [peer.name for peer in self.peers]
                values = [rates[name] for name in names]
                title = f"{KINDS[kind].title}: {TITLES[work]}, rec/s"
                marked = names.index(_OURS[0]) if _OURS[0] in names else None
                charts.append(Series(title, "rec/s", names, values, marked))
        page(path, "Persisting compared with its peers", facts, charts)


def _cell(rates: dict[str, float], name: str) -> str:
    beside = rates.get(YARDSTICK)
    ratio = f"{rates[name] / beside:.2f}x" if beside else ""
    return f"{rates[name]:>21,.0f}{ratio:>10}"
