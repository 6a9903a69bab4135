"""Turns stored values into trees that templates show: folded text, plots, images, lists.

Records are hostile: everything is bounded here, and the templates escape every text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from markupsafe import Markup, escape

from persisting.ui.charts import vector_plot

SHORT_TEXT = 160
LONG_TEXT = 50_000
_MAX_NODES = 2_000
_MAX_ITEMS = 200
_MAX_DEPTH = 30
_SEARCHED_TEXT = 200_000
_MARKED_WORDS = 20
_MIN_VECTOR = 4
_BRIEF = 80

_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


@dataclass
class Node:
    """A value as a template shows it."""

    kind: str
    """text, scalar, null, vector, image, bytes, list, record or cut."""
    name: str = ""
    path: str = ""
    """Where the value is in its record, as the address of an image names it."""
    text: str = ""
    rest: str = ""
    """The part of a long text that is folded."""
    size: int = 0
    norm: str = ""
    plot: Markup = field(default_factory=lambda: Markup(""))
    children: list[Node] = field(default_factory=list)


def tree(record: dict[str, Any]) -> Node:
    """Return a record as a tree."""
    return _Builder().node("", record, "")


class _Builder:
    def __init__(self) -> None:
        self._left = _MAX_NODES

    def node(self, name: str, value: Any, path: str) -> Node:
        self._left -= 1
        if self._left < 0 or path.count(".") > _MAX_DEPTH:
            return Node("cut", name)
        if isinstance(value, dict):
            children = [
                self.node(str(key), item, f"{path}.{number}")
                for number, (key, item) in enumerate(value.items())
            ]
            return Node("record", name, path, size=len(value), children=children)
        if isinstance(value, (list, tuple)):
            return self._list(name, list(value), path)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return _bytes(name, bytes(value), path)
        if isinstance(value, str):
            return Node(
                "text",
                name,
                path,
                text=value[:SHORT_TEXT],
                rest=value[SHORT_TEXT:LONG_TEXT],
                size=len(value),
            )
        if value is None:
            return Node("null", name, path)
        return Node("scalar", name, path, text=plain(value))

    def _list(self, name: str, values: list[Any], path: str) -> Node:
        if is_vector(values):
            norm = math.hypot(*values)
            label = f"{len(values)} · ‖v‖ = {norm:.4g}"
            text = ", ".join(f"{v:.6g}" for v in values[:_MAX_ITEMS])
            if len(values) > _MAX_ITEMS:
                text += ", …"
            plot = vector_plot([float(v) for v in values], label)
            return Node("vector", name, path, text, size=len(values), norm=f"{norm:.4g}", plot=plot)
        children = [
            self.node(str(number), item, f"{path}.{number}")
            for number, item in enumerate(values[:_MAX_ITEMS])
        ]
        if len(values) > _MAX_ITEMS:
            children.append(Node("cut", "…", size=len(values) - _MAX_ITEMS))
        return Node("list", name, path, size=len(values), children=children)


def is_vector(value: Any) -> bool:
    """Return whether a value is a list of finite floats, long enough to be a vector."""
    return (
        isinstance(value, list)
        and len(value) >= _MIN_VECTOR
        and all(type(item) is float and math.isfinite(item) for item in value)
    )


def image_type(data: bytes) -> str | None:
    """Return the type of an image that browsers show and that cannot contain scripts."""
    for magic, name in _IMAGES.items():
        if data.startswith(magic):
            return name
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def value_at(record: dict[str, Any], path: str) -> Any:
    """Return the value at a node's path; LookupError if there is none."""
    value: Any = record
    for part in path.split(".")[1:]:
        if not part.isdecimal():
            raise LookupError(path)
        items: Any = list(value.values()) if isinstance(value, dict) else value
        if not isinstance(items, (list, tuple)):
            raise LookupError(path)
        value = items[int(part)]
    return value


def brief(value: Any, most: int = _BRIEF) -> str:
    """Return a value as one short line, for a cell of a table."""
    if value is None:
        return ""
    if isinstance(value, (bytes, bytearray)):
        return f"<{image_type(bytes(value)) or 'bytes'}, {len(value):,} B>"
    if isinstance(value, list) and is_vector(value):
        return f"[{value[0]:.3g}, {value[1]:.3g}, … {len(value)}]"
    text = value[: most + 1] if isinstance(value, str) else _short_json(value, most)
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}…"


def _short_json(value: Any, most: int) -> str:
    if isinstance(value, list) and len(value) > most:
        value = value[:most]
    return plain(value)


def plain(value: Any) -> str:
    """Return a value as JSON; texts without quotes."""
    encoded = msgspec.json.encode(value, enc_hook=str).decode()
    return encoded[1:-1] if encoded.startswith('"') and not isinstance(value, str) else encoded


def as_json(value: Any) -> bytes:
    """Encode as JSON: bytes as base64, times as ISO 8601, everything else as text."""
    return msgspec.json.encode(value, enc_hook=str)


def highlighted(text: str, words: Iterable[str], most: int = 400) -> Markup:
    """Return a part of a text around the first of some words, with all of them marked."""
    text = text[:_SEARCHED_TEXT]
    chosen = [re.escape(word) for word in words if word][:_MARKED_WORDS]
    if not chosen:
        return escape(brief(text, most))
    pattern = re.compile(f"({'|'.join(chosen)})", re.IGNORECASE)
    first = pattern.search(text)
    start = max(0, first.start() - most // 4) if first else 0
    part = text[start : start + most]
    pieces = [
        Markup("<mark>{}</mark>").format(piece) if number % 2 else escape(piece)
        for number, piece in enumerate(pattern.split(part))
    ]
    before = "…" if start else ""
    after = "…" if start + most < len(text) else ""
    return escape(before) + Markup("").join(pieces) + escape(after)


def _bytes(name: str, data: bytes, path: str) -> Node:
    kind = "image" if image_type(data) else "bytes"
    return Node(kind, name, path, text=data[:64].hex(" "), size=len(data))
