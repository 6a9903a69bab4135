"""Compression has an effect: sizes are measured on disk."""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lance
import pytest
from support.buckets import LANCE, PERSISTING, Kind

from persisting.queue import InvalidArgument

WORDS = " ".join(topics[name] for name in sorted(topics)).split()
"""English prose that every Python installation has."""


def prose(luck: random.Random, count: int) -> str:
    start = luck.randrange(len(WORDS) - count)
    return " ".join(WORDS[start : start + count])


def texts(seed: int = 1, rows: int = 2000) -> list[dict[str, Any]]:
    luck = random.Random(seed)
    return [{"i": i, "text": prose(luck, 60)} for i in range(rows)]


def documents(seed: int = 2, rows: int = 2000) -> list[dict[str, Any]]:
    luck = random.Random(seed)
    return [{"doc": json.dumps(event(luck, i))} for i in range(rows)]


def event(luck: random.Random, number: int) -> dict[str, Any]:
    name = luck.choice(WORDS).lower()
    return {
        "id": number,
        "type": luck.choice(["PushEvent", "IssueCommentEvent", "WatchEvent"]),
        "actor": {"id": luck.randrange(10**6), "url": f"https://api.example.com/users/{name}"},
        "repo": {"id": luck.randrange(10**6), "name": f"{name}/{luck.choice(WORDS)}"},
        "payload": {"action": "created", "comment": {"body": prose(luck, 20), "role": "NONE"}},
        "public": True,
        "created_at": f"2024-01-{luck.randrange(1, 29):02d}T00:00:00Z",
    }


def nested(seed: int = 3, rows: int = 2000) -> list[dict[str, Any]]:
    luck = random.Random(seed)
    return [
        {"user": {"bio": prose(luck, 40)}, "notes": [prose(luck, 20), prose(luck, 20)]}
        for _ in range(rows)
    ]


SHAPES = {"texts": texts, "documents": documents, "nested": nested}


def table_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in (folder / "data.lance" / "data").iterdir())


async def size_of(
    kind: Kind, folder: Path, rows: list[dict[str, Any]], compression: str | None
) -> int:
    async with kind.cls(0, str(folder), compression=compression) as backend:
        await backend.put_batch(rows)
        await backend.flush()
        assert await backend.get(0, 50) == rows[:50]
        assert await backend.get(len(rows) - 10) == rows[-10:]
    return table_bytes(folder)


@pytest.mark.parametrize("kind", [LANCE, PERSISTING], ids=str)
@pytest.mark.parametrize("shape", ["texts", "documents"])
async def test_zstd_is_smaller_than_lz4_is_smaller_than_none(
    kind: Kind, shape: str, tmp_path: Path
) -> None:
    rows = SHAPES[shape]()
    sizes = {
        name: await size_of(kind, tmp_path / str(name), rows, name)
        for name in (None, "lz4", "zstd", "snappy")
    }
    assert sizes["zstd"] < sizes["lz4"] < sizes[None], sizes
    assert sizes["snappy"] <= sizes[None] * 1.1, sizes


async def test_nested_values_are_compressed(tmp_path: Path) -> None:
    rows = nested()
    plain = await size_of(PERSISTING, tmp_path / "none", rows, None)
    packed = await size_of(PERSISTING, tmp_path / "zstd", rows, "zstd")
    assert packed < plain * 0.8


@pytest.mark.parametrize("kind", [LANCE, PERSISTING], ids=str)
def test_an_unknown_codec_raises_at_construction(kind: Kind, folder: Path) -> None:
    for name in ("bogus", "gzip", "zstd:3", "NONE"):
        with pytest.raises(InvalidArgument, match=r"compression must be one of.*'zstd'"):
            kind.cls(0, str(folder), compression=name)


@pytest.mark.parametrize("kind", [LANCE, PERSISTING], ids=str)
async def test_changing_the_option_applies_to_new_data(kind: Kind, folder: Path) -> None:
    parts = {}
    before = 0
    order: list[str | None] = [None, "zstd", "lz4", "zstd", None]
    for number, name in enumerate(order):
        async with kind.cls(0, str(folder), compression=name) as backend:
            await backend.put_batch(texts(seed=number))
        now = table_bytes(folder)
        parts[number], before = now - before, now
    assert parts[1] < parts[2] < parts[0]
    assert abs(parts[3] - parts[1]) < parts[1] * 0.1
    assert abs(parts[4] - parts[0]) < parts[0] * 0.1
    async with kind.cls(0, str(folder)) as backend:
        rows = await backend.get()
    assert rows == [row for number in range(5) for row in texts(seed=number)]


async def test_field_added_later_is_compressed(tmp_path: Path) -> None:
    sizes = {}
    for name in (None, "zstd"):
        folder = tmp_path / str(name)
        async with PERSISTING.cls(0, str(folder), compression=name) as backend:
            await backend.put({"first": 1})
            await backend.flush()
            await backend.put({"later": [1], "n": 1})
            await backend.flush()
            before = table_bytes(folder)
            rows = [{"later": [0.5], "n": 0.5, "more": {"text": r["text"]}} for r in texts()]
            await backend.put_batch(rows)
            await backend.flush()
            sizes[name] = table_bytes(folder) - before
    assert sizes["zstd"] < sizes[None] * 0.8


async def test_a_widened_field_keeps_its_codec(folder: Path) -> None:
    async with PERSISTING.cls(0, str(folder), compression="zstd") as backend:
        await backend.put({"x": 1, "l": [1], "d": {"a": 1}})
        await backend.flush()
        await backend.put({"x": 1.5, "l": [1.5, None], "d": {"a": 1.5, "b": "x"}})
        await backend.flush()
    schema = lance.dataset(str(folder / "data.lance")).schema
    leaves = [
        schema.field("x"),
        schema.field("l").type.value_field,
        *(schema.field("d").type.field(i) for i in range(2)),
    ]
    for leaf in leaves:
        assert (leaf.metadata or {}).get(b"lance-encoding:compression") == b"zstd", leaf


@pytest.mark.parametrize(
    ("name", "effective"), [(None, None), ("zstd", "zstd"), ("lz4", "lz4"), ("snappy", "lz4")]
)
async def test_stats_show_requested_and_effective_compression(
    folder: Path, name: str | None, effective: str | None
) -> None:
    async with PERSISTING.cls(0, str(folder), compression=name) as backend:
        await backend.put({"text": "x" * 100})
        await backend.flush()
        stats = await backend.stats()
    assert stats["compression"] == name
    if effective is None:
        assert stats["compression_effective"] is None
    else:
        assert stats["compression_effective"].startswith(effective)
        assert "snappy" not in stats["compression_effective"]
    field = lance.dataset(str(folder / "data.lance")).schema.field("text")
    used = (field.metadata or {}).get(b"lance-encoding:compression")
    assert used == (effective.encode() if effective else None)


@pytest.mark.parametrize("compression", ["zstd", "lz4", "snappy"])
async def test_very_long_values_survive_compression(folder: Path, compression: str) -> None:
    rows: list[dict[str, Any]] = [
        {"t": "x" * 3_000_000, "b": bytes(2_000_000), "l": list(range(50_000)), "v": [0.5] * 4096},
        {"t": "", "b": b"", "l": [], "v": None},
    ]
    for row in rows:
        row["nested"] = {"t": row["t"], "l": [row["b"], None], "d": [{"l": row["l"]}, None]}
    async with PERSISTING.cls(0, str(folder), compression=compression) as backend:
        await backend.put_batch(rows)
        await backend.flush()
        assert await backend.get() == rows
    async with PERSISTING.cls(0, str(folder)) as backend:
        assert await backend.get() == rows


async def test_log_frames_use_the_codec(tmp_path: Path) -> None:
    sizes = {}
    for name in (None, "snappy", "lz4", "zstd"):
        backend = PERSISTING.cls(
            0, str(tmp_path / str(name)), enable_wal=True, compression=name, flush_interval=None
        )
        await backend.put_batch(documents(rows=500))
        sizes[name] = (await backend.stats())["wal_size"]
        await backend.close()
    assert sizes["zstd"] < sizes["lz4"] < sizes[None]
    assert sizes["zstd"] < sizes["snappy"] < sizes[None]
