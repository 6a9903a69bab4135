"""Create docs/assets/demo.svg from a real run of the demo.

    python docs/tools/demo_svg.py

It takes as long as the demo, about a minute. Only the name of the folder and empty lines are
removed from the output.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parents[1] / "assets" / "demo.svg"
WIDTH = 96
ENDS = "6. Throughput and latency"
"""The heading where the picture ends: charts follow, which a small picture cannot show."""


def run_demo() -> str:
    """Run the demo and return what it prints, with its colours."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "persisting.cli", "demo"],
            cwd=folder,
            env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout.replace(f"{folder}/", "")


def picture(output: str) -> str:
    """Return the output as SVG, without the charts except for their last line."""
    story, heading, charts = output.replace("\r", "").partition(ENDS)
    if not heading:
        raise ValueError(f"the demo printed no heading {ENDS!r}")
    lines = [line for line in story.splitlines() if line.strip("\x1b[0123456789;m ")]
    lines += re.findall(r".*Every claim held.*? s\.", charts)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print("[dim]$ make demo[/dim]")
    for line in lines:
        console.print(Text.from_ansi(line), overflow="ellipsis", no_wrap=True)
    # rich refers to a font on the network; use local ones instead.
    svg = console.export_svg(title="persisting demo", unique_id="persisting-demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def main() -> None:
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture(run_demo()), encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
