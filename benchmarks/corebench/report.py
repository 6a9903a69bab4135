"""Takes measurements, compares them, prints them and writes them to a file."""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

_LARGE = 10_000


@dataclass(frozen=True)
class Target:
    """A bound on a value or on its ratio to the compared value."""

    of: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float, ratio: float | None) -> bool | None:
        number = ratio if self.of == "ratio" else value
        if number is None:
            return None
        if self.at_least is not None:
            return number >= self.at_least
        return self.at_most is None or number <= self.at_most

    def __str__(self) -> str:
        sign, bound = ("≥", self.at_least) if self.at_least is not None else ("≤", self.at_most)
        return f"{sign} {bound:g}{'x' if self.of == 'ratio' else ''}"


@dataclass(frozen=True)
class Row:
    """One line of the table: ours, what it is compared with, and the target."""

    group: str
    name: str
    value: float
    unit: str
    beside: str = ""
    beside_value: float | None = None
    target: Target | None = None
    median_ratio: float | None = None
    """The median of the ratios within a round, where systems took turns."""

    @property
    def ratio(self) -> float | None:
        return self.value / self.beside_value if self.beside_value else None

    @property
    def met(self) -> bool | None:
        return self.target.met(self.value, self.ratio) if self.target else None


@dataclass
class Run:
    """One run of a benchmark program: sizes, a folder, and the rows so far."""

    records: int
    repeat: int
    folder: Path
    rows: list[Row] = field(default_factory=list)

    def add(self, *args: object, **kwargs: object) -> None:
        row = Row(*args, **kwargs)  # type: ignore[arg-type]
        self.rows.append(row)
        print(line(row), flush=True)

    def best(self, *measures: Callable[[Path], float]) -> list[float]:
        """Return the highest of ``repeat`` measurements of each, each in its own folder.

        Noise only slows a program down, so the best run is the most accurate one. The measurements
        take turns, so that noise affects all of them.
        """
        found: list[list[float]] = [[] for _ in measures]
        for _ in range(self.repeat):
            for measure, values in zip(measures, found, strict=True):
                with self.scratch() as folder:
                    values.append(measure(folder))
        return [max(values) for values in found]

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a new folder, after writing out what the previous measurement left in caches."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        gc.collect()
        if self.records >= _LARGE:
            os.sync()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since entry; leaving the context stops it."""
    started = time.perf_counter()
    ended: list[float] = []
    yield lambda: (ended[0] if ended else time.perf_counter()) - started
    ended.append(time.perf_counter())


def rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else float("inf")


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


_VALUE = {"rec/s": "{:,.0f}", "rows/s": "{:,.0f}", "pages/s": "{:,.0f}"}
HEADER = (
    f"{'':13}{'measured':47}{'ours':>12} {'unit':7} "
    f"{'compared with':33}{'theirs':>12}{'ratio':>8}  target"
)


def line(row: Row) -> str:
    form = _VALUE.get(row.unit, "{:,.2f}")
    theirs = "" if row.beside_value is None else form.format(row.beside_value)
    ratio = "" if row.ratio is None else f"{row.ratio:.{2 if row.ratio < 1000 else 0}f}x"
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    if row.median_ratio is not None:
        verdict += f" (median {row.median_ratio:.2f}x)"
    return (
        f"{row.group:13}{row.name:47}{form.format(row.value):>12} {row.unit:7} "
        f"{row.beside:33}{theirs:>12}{ratio:>8}  {row.target or ''} {verdict}".rstrip()
    )


def announce(records: int, repeat: int) -> dict[str, object]:
    """Print what a run measures and how busy the machine is; return the machine."""
    before = machine()
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{records:,} records, best of {repeat}, load average {loads}", flush=True)
    return before


def machine() -> dict[str, object]:
    """Return the machine and versions that were measured."""
    import lance
    import pyarrow

    import persisting

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "persisting": persisting.__version__,
        "pylance": lance.__version__,
        "pyarrow": pyarrow.__version__,
    }


def write_json(
    run: Run, folder: Path, before: dict[str, object], name: str = "core", **more: object
) -> Path:
    """Write the run to a JSON file, so that later runs can be compared with it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    rows = [{**asdict(r), "ratio": r.ratio, "met": r.met} for r in run.rows]
    content = {"machine": before, "records": run.records, "repeat": run.repeat, "rows": rows}
    content |= more
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path
