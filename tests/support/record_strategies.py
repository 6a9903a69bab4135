"""Strategies for records: first the type of each field, then values of that type."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st

from persisting.errors import SchemaError
from persisting.records.field_names import check_name


def _is_name(text: str) -> bool:
    try:
        check_name(text)
    except SchemaError:
        return False
    return True


NAMES = st.one_of(
    st.sampled_from(["id", "text", "Value", "a b", "数", "_x", "item", "a'b"]),
    st.text(min_size=1, max_size=6).filter(_is_name),
)

OFFSETS = st.timedeltas(min_value=dt.timedelta(hours=-23), max_value=dt.timedelta(hours=23))
ZONES = st.one_of(st.just(dt.timezone.utc), OFFSETS.map(dt.timezone))

SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=64),
    "str": st.text(max_size=20),
    "bytes": st.binary(max_size=20),
    "naive": st.datetimes(),
    "aware": st.datetimes(dt.datetime(1, 1, 3), dt.datetime(9999, 12, 29), timezones=ZONES),
    "date": st.dates(),
    "time": st.times(),
    "timedelta": st.timedeltas(dt.timedelta(days=-(10**8)), dt.timedelta(days=10**8)),
    "decimal": st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: Decimal(f"{n}e-18")),
    "uuid": st.uuids(),
    "np-float32": st.floats(width=32).map(np.float32),
    "np-int": st.integers(-128, 127).map(np.int8),
    "none": st.none(),
}


@st.composite
def field_types(draw: st.DrawFn, depth: int = 3) -> tuple[Any, ...]:
    """("scalar", name) · ("vector", length) · ("list", type) · ("dict", {name: type})."""
    kinds = ["scalar", "scalar", "vector"] + (["list", "dict"] * 2 if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "scalar":
        return (kind, draw(st.sampled_from(sorted(SCALARS))))
    if kind == "vector":
        return (kind, draw(st.integers(1, 4)))
    if kind == "list":
        return (kind, draw(field_types(depth - 1)))
    names = draw(st.lists(NAMES, unique=True, max_size=3))
    return (kind, {name: draw(field_types(depth - 1)) for name in names})


@st.composite
def values(draw: st.DrawFn, kind: tuple[Any, ...], *, lacking: bool) -> Any:
    """Draw a value of a type, or None; with ``lacking`` dicts may lack fields."""
    if draw(st.integers(0, 5)) == 0:
        return None
    name, of = kind
    if name == "scalar":
        return draw(SCALARS[of])
    if name == "vector":
        floats = st.floats(width=64)
        return draw(st.lists(floats, min_size=of, max_size=of))
    if name == "list":
        return draw(st.lists(values(of, lacking=lacking), max_size=3))
    return draw(dicts(of, lacking=lacking))


@st.composite
def dicts(draw: st.DrawFn, fields: dict[str, Any], *, lacking: bool) -> dict[str, Any]:
    return {
        name: draw(values(kind, lacking=lacking))
        for name, kind in fields.items()
        if not lacking or draw(st.integers(0, 4))
    }


@st.composite
def tables(draw: st.DrawFn, *, lacking: bool) -> list[dict[str, Any]]:
    """Draw records of one schema, which may lack fields."""
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=4))
    fields = {name: draw(field_types()) for name in names}
    return draw(st.lists(dicts(fields, lacking=lacking), min_size=1, max_size=5))
