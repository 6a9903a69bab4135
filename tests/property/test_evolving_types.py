"""Fields of any type may widen at any depth without changing stored values."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buckets import PERSISTING, WAL_ZSTD, Bucket, Kind
from support.comparing import equal_but_for_absent
from support.record_strategies import NAMES, SCALARS

EXAMPLES = 25
NIGHTLY_EXAMPLES = 1500

NUMBERS = {
    "int": st.integers(-(2**53), 2**53),
    "float": st.floats(allow_nan=False),
    "both": st.integers(-(2**53), 2**53) | st.floats(allow_nan=False),
}
OTHERS = ["str", "bytes", "bool", "aware", "date", "decimal", "uuid"]


@st.composite
def kinds(draw: st.DrawFn, depth: int = 3) -> tuple[Any, ...]:
    """("none",) · ("number", which) · ("scalar", name) · ("vector", length) · list · dict."""
    names = ["none", "number", "number", "scalar", "vector"] + (
        ["list", "dict"] * 2 if depth else []
    )
    kind = draw(st.sampled_from(names))
    if kind == "none":
        return (kind,)
    if kind == "number":
        return (kind, draw(st.sampled_from(sorted(NUMBERS))))
    if kind == "scalar":
        return (kind, draw(st.sampled_from(OTHERS)))
    if kind == "vector":
        return (kind, draw(st.integers(0, 3)))
    if kind == "list":
        return (kind, draw(kinds(depth - 1)))
    fields = draw(st.lists(NAMES, unique=True, max_size=3))
    return (kind, {name: draw(kinds(depth - 1)) for name in fields})


@st.composite
def wider(draw: st.DrawFn, kind: tuple[Any, ...], depth: int = 3) -> tuple[Any, ...]:
    """Draw a type that a field of ``kind`` can widen to."""
    if draw(st.integers(0, 3)) == 0:
        return kind
    if kind[0] == "none":
        return draw(kinds(depth))
    if kind[0] == "number":
        return ("number", draw(st.sampled_from(sorted(NUMBERS))))
    if kind[0] == "vector":
        return draw(st.sampled_from([("vector", 2), ("vector", 3), ("list", ("number", "both"))]))
    if kind[0] == "list":
        return ("list", draw(wider(kind[1], depth - 1)))
    if kind[0] == "dict":
        fields = {name: draw(wider(of, depth - 1)) for name, of in kind[1].items()}
        for name in draw(st.lists(NAMES, unique=True, max_size=2)):
            if name not in fields and depth > 0:
                fields[name] = draw(kinds(depth - 1))
        return ("dict", fields)
    return kind


@st.composite
def values(draw: st.DrawFn, kind: tuple[Any, ...]) -> Any:
    if kind[0] == "none" or draw(st.integers(0, 5)) == 0:
        return None
    if kind[0] == "number":
        return draw(NUMBERS[kind[1]])
    if kind[0] == "scalar":
        return draw(SCALARS[kind[1]])
    if kind[0] == "vector":
        floats = st.floats(allow_nan=False)
        return draw(st.lists(floats, min_size=kind[1], max_size=kind[1]))
    if kind[0] == "list":
        return draw(st.lists(values(kind[1]), max_size=3))
    return {name: draw(values(of)) for name, of in kind[1].items() if draw(st.integers(0, 4))}


@st.composite
def histories(draw: st.DrawFn) -> list[Any]:
    """Draw batches of records whose types widen from one batch to the next, with flushes."""
    kind = (
        "dict",
        {name: draw(kinds()) for name in draw(st.lists(NAMES, unique=True, max_size=3))},
    )
    history: list[Any] = []
    for _ in range(draw(st.integers(2, 4))):
        history.append([draw(values(kind)) or {} for _ in range(draw(st.integers(1, 3)))])
        history.append(draw(st.sampled_from(["flush", "reopen", "go on"])))
        kind = draw(wider(kind))
    return history


async def replay(kind: Kind, history: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bucket = Bucket(kind, Path(folder))
        backend = bucket.open(flush_interval=None)
        stored: list[dict[str, Any]] = []

        async def check(when: str) -> None:
            for offset in (0, len(stored) // 2, max(0, len(stored) - 1)):
                got = await backend.get(offset)
                assert len(got) == len(stored) - offset, when
                for ours, theirs in zip(stored[offset:], got, strict=True):
                    assert equal_but_for_absent(ours, theirs), f"{when}\n{ours!r}\n{theirs!r}"

        try:
            for step in history:
                if isinstance(step, list):
                    for record in step:
                        await backend.put(record)
                    stored += step
                elif step == "flush":
                    await backend.flush()
                elif step == "reopen":
                    backend = await bucket.reopen(backend, flush_interval=None)
                await check(str(step))
            backend = await bucket.reopen(backend)
            await check("at the end")
        finally:
            await bucket.close()


def evolution(examples: int) -> Any:
    @settings(max_examples=examples, derandomize=examples <= EXAMPLES)
    @given(history=histories())
    def check(kind: Kind, history: list[Any]) -> None:
        asyncio.run(replay(kind, history))

    return check


both = pytest.mark.parametrize("kind", [PERSISTING, WAL_ZSTD], ids=str)

test_types_widen_at_any_depth = both(evolution(EXAMPLES))
test_nightly_types_widen_at_any_depth = pytest.mark.nightly(
    pytest.mark.timeout(3600)(both(evolution(NIGHTLY_EXAMPLES)))
)
