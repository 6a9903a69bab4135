"""Restoring a version with other fields than today's."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, Bucket, Kind

from persisting.queue import SchemaError


async def other_type(bucket: Bucket, first: Any, second: Any) -> Any:
    """Return a bucket whose field ``x`` holds ``second``, and ``first`` in the tag "first"."""
    backend = bucket.open()
    await backend.put({"x": None})
    await backend.tag("none")
    await backend.put({"x": first})
    await backend.tag("first")
    await backend.restore("none")
    backend = await bucket.reopen(backend)
    await backend.put({"x": second})
    return backend


@pytest.mark.parametrize("kind", [LANCE, PERSISTING, WAL_SYNCED], ids=str)
@pytest.mark.parametrize(
    ("first", "second"), [("text", 1), (1, "text"), ([1.0, 2.0], "text"), ({"q": 1}, 5)], ids=str
)
async def test_restore_brings_back_the_fields_of_the_version(
    kind: Kind, first: Any, second: Any, tmp_path: Path
) -> None:
    bucket = Bucket(kind, tmp_path / "b")
    backend = await other_type(bucket, first, second)
    await backend.tag("second")
    await backend.restore("first")
    expected = [{"x": None}, {"x": first}]
    assert await backend.get() == expected
    with pytest.raises(SchemaError, match="'x'"):
        await backend.put({"x": second})
    await backend.put({"x": first})
    await backend.flush()
    backend = await bucket.reopen(backend)
    assert await backend.get() == [*expected, {"x": first}]
    await backend.restore("second")
    await backend.put({"x": second})
    assert await backend.get() == [{"x": None}, {"x": second}, {"x": second}]
    await bucket.close()


@pytest.mark.parametrize("kind", [PERSISTING, WAL_SYNCED], ids=str)
async def test_restored_int_field_stays_int(kind: Kind, tmp_path: Path) -> None:
    bucket, large = Bucket(kind, tmp_path / "b"), 2**60 + 1
    backend = bucket.open()
    await backend.put({"x": 1})
    await backend.tag("small")
    await backend.put({"x": large})
    await backend.tag("large")
    await backend.restore("small")
    backend = await bucket.reopen(backend)
    await backend.put({"x": 0.5})
    await backend.flush()
    await backend.restore("large")
    assert await backend.get() == [{"x": 1}, {"x": large}]
    with pytest.raises(SchemaError, match="'x'"):
        await backend.put({"x": 0.5})
    await backend.put({"x": 2})
    backend = await bucket.reopen(backend)
    assert await backend.get() == [{"x": 1}, {"x": large}, {"x": 2}]
    await bucket.close()


async def test_a_restore_that_contradicts_the_topic_changes_nothing(tmp_path: Path) -> None:
    first = Bucket(PERSISTING, tmp_path / "bucket_0")
    backend = await other_type(first, "text", None)
    await backend.close()
    other = Bucket(PERSISTING, tmp_path / "bucket_1")
    shared = {"schema_path": tmp_path / "schema.json"}
    await other.open(**shared).put({"x": 1})
    backend = first.open(**shared)
    before = await backend.get()
    with pytest.raises(SchemaError, match="'x'"):
        await backend.restore("first")
    assert await backend.get() == before
    await backend.put({"x": 2})
    backend = await first.reopen(backend, **shared)
    assert await backend.get() == [*before, {"x": 2}]
    await first.close()
    await other.close()


@pytest.mark.parametrize("zone", [None, dt.timezone(dt.timedelta(hours=14))], ids=str)
async def test_restore_accepts_the_earliest_and_latest_datetimes(
    tmp_path: Path, zone: dt.timezone | None
) -> None:
    bucket = Bucket(LANCE, tmp_path / "b")
    backend = bucket.open()
    await backend.put({"x": 1})
    await backend.flush()
    assert await backend.get(version=dt.datetime.min.replace(tzinfo=zone)) == []
    assert await backend.get(version=dt.datetime.max.replace(tzinfo=zone)) == [{"x": 1}]
    await bucket.close()
