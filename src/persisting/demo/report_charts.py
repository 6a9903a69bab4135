"""Small charts: bars in a terminal, and a self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_BARS = " ▁▂▃▄▅▆▇█"


class Series(NamedTuple):
    """Named values, such as rates over time or counts by range."""

    title: str
    unit: str
    names: Sequence[str]
    values: Sequence[float]
    marked: int | None = None
    """Index of a value to highlight, such as the time of the kill."""


def bars(series: Series, height: int = 5) -> list[str]:
    """Draw columns of blocks, labelled with the highest value."""
    top = max(series.values, default=0) or 1
    lines = []
    for row in reversed(range(height)):
        cells = "".join(_cell(value / top * height - row) for value in series.values)
        label = f"{top:>9,.0f} " if row == height - 1 else f"{0:>9} " if row == 0 else " " * 10
        lines.append(label + cells)
    if series.marked is not None:
        lines.append(" " * (10 + series.marked) + "↑ kill -9")
    return lines


def _cell(level: float) -> str:
    return _BARS[max(0, min(8, round(level * 8)))]


def page(
    path: Path, title: str, facts: Sequence[tuple[str, str]], charts: Sequence[Series]
) -> None:
    """Write an HTML page with facts and charts."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in facts
    )
    path.write_text(
        f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }}
th {{ text-align: left; padding-right: 2rem; font-weight: 500 }}
svg {{ width: 100%; height: auto }} rect {{ fill: #3b7dd8 }} .marked {{ fill: #d8433b }}
text {{ font-size: 11px; fill: #555 }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #181a1b }}
  text {{ fill: #aaa }} }}
</style>
<h1>{html.escape(title)}</h1><table>{rows}</table>
{"".join(map(_svg, charts))}
</html>
""",
        encoding="utf-8",
    )


def _svg(series: Series) -> str:
    top = max(series.values, default=0) or 1
    width = 900 / max(1, len(series.values))
    shapes = []
    for place, (name, value) in enumerate(zip(series.names, series.values, strict=True)):
        tall = 180 * value / top
        kind = ' class="marked"' if place == series.marked else ""
        shapes.append(
            f'<rect{kind} x="{60 + place * width:.1f}" y="{200 - tall:.1f}" '
            f'width="{max(1.0, width - 2):.1f}" height="{tall:.1f}">'
            f"<title>{html.escape(name)}: {value:,.0f} {html.escape(series.unit)}</title></rect>"
        )
        if len(series.values) <= 16 or place % 4 == 0:
            shapes.append(
                f'<text x="{60 + (place + 0.5) * width:.1f}" y="216" text-anchor="middle">'
                f"{html.escape(name)}</text>"
            )
    return (
        f"<h2>{html.escape(series.title)}</h2>"
        f'<svg viewBox="0 0 980 225" role="img" aria-label="{html.escape(series.title)}">'
        f'<text x="55" y="25" text-anchor="end">{top:,.0f}</text>'
        f'<text x="55" y="200" text-anchor="end">0</text>{"".join(shapes)}</svg>'
    )
