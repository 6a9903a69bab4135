"""Strategies for invalid and hostile file contents."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

DEEP = b'{"x":' * 3000 + b"1" + b"}" * 3000
WIDE = json.dumps({f"f{n}": n for n in range(20_000)}).encode()

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["", "..", "/etc/passwd", "../../x", "a\0b", "bucket_0", "9" * 40]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@st.composite
def twisted(draw: st.DrawFn, good: Any) -> Any:
    """Draw a valid document in which one value is replaced."""
    if isinstance(good, dict) and good and draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(good)))
        way = draw(st.integers(0, 4))
        if way == 0:
            return {key: value for key, value in good.items() if key != name}
        if way == 1:
            return {**good, draw(st.text(max_size=6)): draw(JSON)}
        return {**good, name: draw(twisted(good[name]))}
    if isinstance(good, list) and good and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(good) - 1))
        return [*good[:at], draw(twisted(good[at])), *good[at + 1 :]]
    return draw(JSON)


def documents(good: bytes) -> st.SearchStrategy[bytes]:
    """Draw bytes in place of a JSON document: garbage, a part of it, another or a changed one."""
    return st.one_of(
        st.binary(max_size=60),
        st.integers(0, len(good)).map(lambda size: good[:size]),
        st.sampled_from([DEEP, WIDE, b"[" * 100_000, b'"' + b"x" * 100_000, b"\xef\xbb\xbf{}"]),
        twisted(json.loads(good)).map(lambda made: json.dumps(made).encode()),
    )
