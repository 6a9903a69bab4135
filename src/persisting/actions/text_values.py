"""Durations, sizes and times as people write and read them; a wrong text raises ValueError."""

from __future__ import annotations

import datetime as dt
import re

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BYTES = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_duration(text: str) -> float:
    """Return the seconds of ``90s``, ``15m``, ``12h``, ``7d``, ``2w``, or a number of seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or (match[2] or "s") not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write 90s, 15m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def parse_size(text: str) -> int:
    """Return the bytes of ``500k``, ``10MB``, ``2G``, or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if not match:
        raise ValueError(f"{text!r} is not a size; write 500k, 10MB or 2G")
    return int(float(match[1]) * _BYTES[match[2]])


def format_size(count: float) -> str:
    """Format a number of bytes as readable text."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def parse_time(text: str) -> dt.datetime:
    """Return an ISO time (in the local zone unless it names one), or ``2h`` as two hours ago."""
    try:
        return dt.datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
    except (ValueError, OverflowError):
        pass
    try:
        ago = parse_duration(text.removesuffix(" ago"))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; write 2026-11-15T14:30, or 2h for two hours ago"
        ) from None
    try:
        return dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=ago)
    except OverflowError:
        raise ValueError(f"{text!r} is too far in the past") from None
