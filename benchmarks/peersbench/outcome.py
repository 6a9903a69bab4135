"""What was measured: as a table, as rows of ours beside everyone, and as a page with charts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from corebench.report import Row, Run, Target

from peersbench import ours
from peersbench.kinds import KINDS, Kind
from peersbench.peer import Peer
from peersbench.registry import TARGETS, YARDSTICK
from peersbench.work import TITLES
from persisting.demo.charts import Series, page

_OURS = (ours.SYNCED.name, ours.DEFAULT.name, ours.UNLOGGED.name)


@dataclass
class Outcome:
    """Records per second of every peer, for each kind of record and each work."""

    peers: list[Peer]
    rates: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """kind → work → peer."""

    def keep(self, kind: Kind, work: str, peer: Peer, found: float) -> None:
        of_work = self.rates.setdefault(kind.name, {}).setdefault(work, {})
        of_work[peer.name] = max(found, of_work.get(peer.name, 0.0))

    def table(self, kind: Kind, count: int) -> str:
        """Records per second, and how many times SQLite's."""
        rates = self.rates[kind.name]
        titles = "".join(f"{TITLES[work]:>31}" for work in TITLES)
        lines = [f"\n{kind.title}, {count:,} records; rec/s and times {YARDSTICK}'s"]
        lines += [f"{'':16}{'durable':28}{titles}"]
        for peer in self.peers:
            cells = "".join(_cell(rates[work], peer.name) for work in TITLES)
            lines.append(f"{peer.name:16}{peer.durability:28}{cells}")
        return "\n".join(lines)

    def beside_everyone(self, run: Run) -> None:
        """A row for each of ours beside each of the others, the targets where they are."""
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
        """A page that a browser shows without anything else."""
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
        page(path, "persisting beside its peers", facts, charts)


def _cell(rates: dict[str, float], name: str) -> str:
    beside = rates.get(YARDSTICK)
    ratio = f"{rates[name] / beside:.2f}x" if beside else ""
    return f"{rates[name]:>21,.0f}{ratio:>10}"
