"""Small charts as SVG, drawn by the server.

A strict Content-Security-Policy forbids inline styles, so colours come from classes.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TypeVar

from markupsafe import Markup, escape

from persisting.ui.series import Point

_T = TypeVar("_T")
_WIDTH, _HEIGHT = 340, 90
_SPARK_WIDTH, _SPARK_HEIGHT = 96, 20
_MAX_POINTS = 240


def sparkline(points: Sequence[Point], since: float, until: float) -> Markup:
    """Draw a line without axes; it repeats a number that is shown beside it."""
    if len(points) < 2:
        return Markup("")
    top = max(point.value for point in points) or 1.0
    line = _line(points, since, until, top, _SPARK_WIDTH, _SPARK_HEIGHT)
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" aria-hidden="true"><polyline points="{}"/></svg>'
    ).format(_SPARK_WIDTH, _SPARK_HEIGHT, line)


def line_chart(
    title: str, points: Sequence[Point], since: float, until: float, shown_max: str
) -> Markup:
    """Draw a value over time; ``shown_max`` is its largest value as text."""
    top = max((point.value for point in points), default=0.0) or 1.0
    line = _line(points, since, until, top, _WIDTH, _HEIGHT)
    times = [
        dt.datetime.fromtimestamp(time, dt.timezone.utc).strftime("%H:%M:%S")
        for time in (since, until)
    ]
    return Markup(
        '<svg class="chart" viewBox="0 -14 {w} {full}" role="img" aria-label="{label}">'
        '<line class="axis" x1="0" y1="{h}" x2="{w}" y2="{h}"/>'
        '<polyline points="{line}"/>'
        '<text x="0" y="-4">{top}</text>'
        '<text x="0" y="{below}">{first}</text>'
        '<text x="{w}" y="{below}" text-anchor="end">{last} UTC</text></svg>'
    ).format(
        w=_WIDTH,
        h=_HEIGHT,
        full=_HEIGHT + 32,
        below=_HEIGHT + 14,
        label=f"{title}: {shown_max}",
        line=line,
        top=shown_max,
        first=times[0],
        last=times[1],
    )


def vector_plot(values: Sequence[float], label: str) -> Markup:
    """Draw the numbers of a vector as bars around zero."""
    shown = _thinned(list(values), 128)
    largest = max((abs(value) for value in shown), default=0.0) or 1.0
    width = len(shown) * 3
    bars = Markup("").join(
        Markup('<rect x="{}" y="{}" width="2" height="{}"/>').format(
            number * 3,
            f"{20 - max(value, 0) / largest * 18:.1f}",
            f"{max(abs(value) / largest * 18, 0.5):.1f}",
        )
        for number, value in enumerate(shown)
    )
    return Markup(
        '<svg class="vector" viewBox="0 0 {} 40" preserveAspectRatio="none" role="img" '
        'aria-label="{}">{}</svg>'
    ).format(width, escape(label), bars)


def _line(
    points: Sequence[Point], since: float, until: float, top: float, width: int, height: int
) -> str:
    span = max(until - since, 1e-9)
    places = []
    for time, value in _thinned(list(points), _MAX_POINTS):
        x = min(max((time - since) / span, 0.0), 1.0) * width
        places.append(f"{x:.1f},{height - value / top * (height - 2):.1f}")
    return " ".join(places)


def _thinned(values: list[_T], most: int) -> list[_T]:
    """Return at most ``most`` values, evenly chosen, with the last."""
    if len(values) <= most:
        return values
    step = len(values) / most
    return [values[int(number * step)] for number in range(most - 1)] + [values[-1]]
