"""Hostile records are stored unchanged or refused, without effect on others."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, Bucket, Kind
from support.comparing import equal_but_for_absent

from persisting.errors import SchemaError


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


SHAPES: dict[str, Any] = {
    "deep dict": lambda: {"x": nested(60, lambda v: {"a": v})},
    "deep list": lambda: {"x": nested(60, lambda v: [v])},
    "deeper dict": lambda: {"x": nested(5000, lambda v: {"a": v})},
    "deeper list": lambda: {"x": nested(5000, lambda v: [v])},
    "itself": lambda: {"x": itself()},
    "wide": lambda: {f"f{n}": n for n in range(400)},
    "wide below": lambda: {"x": {f"f{n}": n for n in range(400)}},
    "long name": lambda: {"n" * 100_000: 1},
    "huge text": lambda: {"x": "é" * (8 << 20)},
    "huge bytes": lambda: {"x": bytes(16 << 20)},
    "huge list": lambda: {"x": list(range(1 << 17))},
    "huge vector": lambda: {"x": [0.5] * (1 << 16)},
    "huge number": lambda: {"x": 10**5000},
    "many types": lambda: {"x": [1, "a", None, 2.5, {"a": 1}, [1]]},
    "half a character": lambda: {"x": "\ud800"},
    "half a name": lambda: {"\ud800": 1},
    "no name": lambda: {"": 1},
    "numbers as names": lambda: {1: 2},
    "an object": lambda: {"x": object()},
    "a class": lambda: {"x": int},
    "a generator": lambda: {"x": (n for n in range(3))},
    "a set": lambda: {"x": {1, 2}},
    "no record": lambda: [1, 2],
    "nothing": lambda: None,
    "empty": lambda: {},
    "reserved": lambda: {"_rowid": 1, "_rowaddr": 2, "_distance": 1.0, "_score": 1.0},
    "ours": lambda: {"_persisting_time": 5, "_bucket": 1, "_offset": 3},
}
KEYS = st.text(max_size=6) | st.sampled_from(["_rowid", "_persisting_time", "a.b", "`", "'", "*"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
BEFORE, AFTER = {"id": "before", "n": 1}, {"id": "after", "n": 2}


async def put_between(kind: Kind, record: Any) -> None:
    """Put a record between two good ones: it is refused, or survives a flush and a reopening."""
    with tempfile.TemporaryDirectory() as name:
        bucket = Bucket(kind, Path(name) / "bucket_0")
        backend = bucket.open(flush_interval=None)
        try:
            if kind.evolving:
                await backend.put(BEFORE)
            wanted = [BEFORE] if kind.evolving else []
            try:
                await backend.put(record)
                wanted.append(record)
            except SchemaError:
                pass
            if kind.evolving:
                await backend.put(AFTER)
                wanted.append(AFTER)
            for _ in range(2):
                found = await backend.get()
                assert len(found) == len(wanted)
                assert all(map(equal_but_for_absent, wanted, found))
                await backend.flush()
                backend = await bucket.reopen(backend, flush_interval=None)
        finally:
            await bucket.close()


@pytest.mark.parametrize("kind", [PERSISTING, WAL_SYNCED], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
async def test_hostile_record_is_stored_unchanged_or_refused(kind: Kind, shape: str) -> None:
    await put_between(kind, SHAPES[shape]())


def fuzzing(examples: int) -> Any:
    @settings(max_examples=examples, derandomize=examples < 1000)
    @given(
        kind=st.sampled_from([LANCE, PERSISTING, WAL_SYNCED]),
        record=st.dictionaries(KEYS, VALUES, max_size=4) | VALUES,
    )
    def check(kind: Kind, record: Any) -> None:
        asyncio.run(put_between(kind, record))

    return check


test_any_record_is_stored_as_it_is_or_refused = fuzzing(40)
test_any_record_is_stored_as_it_is_or_refused_at_length = pytest.mark.timeout(3600)(
    pytest.mark.nightly(fuzzing(5000))
)
