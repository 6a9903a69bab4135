"""Command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


class BenchParser(argparse.ArgumentParser):
    """A parser that prints the docstring of the benchmark as it is written."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_count(self, flag: str, default: int) -> None:
        self.add_argument(flag, type=int, default=default, help=f"default: {default:,}")

    def add_quick(self, help: str = "50,000 records, each measured once") -> None:
        self.add_argument("--quick", action="store_true", help=help)

    def add_repeat(self) -> None:
        self.add_argument(
            "--repeat", type=int, default=3, help="number of measurements; the best counts"
        )

    def add_only(self, choices: Iterable[str], what: str = "benchmark to run") -> None:
        self.add_argument(
            "--only", action="append", choices=choices, help=f"{what}; may be repeated"
        )

    def add_folder(self) -> None:
        self.add_argument(
            "--folder", type=Path, help="folder for the data (default: a temporary one)"
        )

    def add_results(self, what: str = "the JSON file") -> None:
        self.add_argument("--results", type=Path, default=RESULTS, help=f"folder for {what}")
