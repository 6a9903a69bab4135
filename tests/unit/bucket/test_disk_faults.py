"""One disk fault at any call: nothing is lost or stored twice, and the bucket recovers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, Bucket, Kind, until_freed
from support.comparing import equal_but_for_absent
from support.faults import FaultyFileSystem

from persisting import fs
from persisting.queue import StorageError

MANY = 200
"""More calls than any of these flushes makes."""

STRIDES = {"widen-all": 11, "widen": 5, "none-becomes-typed": 5, "nested-field": 3, "new-field": 2}
"""The default run fails every n-th call in turn; the nightly run fails each one."""

SCENARIOS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "first-flush": ([], [{"a": 1}, {"a": 2}]),
    "append": ([{"a": 1}], [{"a": 2}, {"a": 3}]),
    "none-becomes-typed": ([{"a": None, "b": []}], [{"a": 2, "b": ["x"]}]),
    "new-field": ([{"a": 1}], [{"a": 2, "b": {"c": [1]}}]),
    "nested-field": ([{"d": {"a": 1}, "l": [{"a": 1}]}], [{"d": {"b": 1}, "l": [{"b": "x"}]}]),
    "widen": ([{"a": 1}], [{"a": 2.5}]),
    "widen-all": (
        [{"a": 1, "b": [1], "d": {"x": 1}, "v": [0.5, 1.5]}],
        [{"a": 2.5, "b": [1.5, None], "d": {"x": 1.5, "y": "n"}, "v": [0.5], "new": [{"z": 1}]}],
    ),
}


def matches(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> bool:
    return len(expected) == len(got) and all(map(equal_but_for_absent, expected, got))


CASES = [
    *((LANCE, name) for name in ("first-flush", "append")),
    *((PERSISTING, name) for name in SCENARIOS),
    *((WAL_SYNCED, name) for name in ("first-flush", "append", "widen-all")),
]


@pytest.mark.parametrize(("kind", "scenario"), CASES, ids=str)
async def test_a_flush_that_fails_at_any_call_heals(
    kind: Kind, scenario: str, tmp_path: Path
) -> None:
    await sweep(kind, scenario, tmp_path, STRIDES.get(scenario, 1))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [PERSISTING, WAL_SYNCED], ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_nightly_a_flush_that_fails_at_every_call_heals(
    kind: Kind, scenario: str, tmp_path: Path
) -> None:
    await sweep(kind, scenario, tmp_path, 1)


async def sweep(kind: Kind, scenario: str, tmp_path: Path, stride: int) -> None:
    first, second = SCENARIOS[scenario]
    for index in range(0, MANY, stride):
        with fs.use(FaultyFileSystem()) as files:
            assert isinstance(files, FaultyFileSystem)
            bucket = Bucket(kind, tmp_path / str(index))
            backend = bucket.open(flush_interval=None)
            await backend.put_batch(first)
            await backend.flush()
            await backend.put_batch(second)
            files.fail_once_at(index)
            failure = ""
            try:
                await backend.flush()
            except StorageError as exc:
                failure = str(exc)
            assert not failure or "injected" in failure
            reached = not files.heal()
            where = f"call {index}: {files.calls[-1]}"
            assert matches(first + second, await backend.get()), where
            await backend.put_batch(second)
            await backend.flush()
            assert matches(first + second * 2, await backend.get()), where
            assert (await backend.stats())["persisted_count"] == len(first + second * 2)
            backend = await bucket.reopen(backend)
            assert matches(first + second * 2, await backend.get()), where
            await bucket.close()
        if not reached:
            assert not failure
            return
    pytest.fail("a flush makes no end of calls")


@pytest.mark.parametrize("kind", [PERSISTING, WAL_SYNCED], ids=str)
async def test_a_put_that_fails_at_any_call_is_refused_or_stored_once(
    kind: Kind, tmp_path: Path
) -> None:
    for index in range(MANY):
        with fs.use(FaultyFileSystem()) as files:
            assert isinstance(files, FaultyFileSystem)
            bucket = Bucket(kind, tmp_path / str(index))
            backend = bucket.open(flush_interval=None)
            stored = [{"i": 0}]
            await backend.put(stored[0])
            files.fail_once_at(index)
            for i in range(1, 5):
                try:
                    await backend.put({"i": i})
                except StorageError:
                    continue
                stored.append({"i": i})
            reached = not files.heal()
            assert await backend.get() == stored
            await backend.put({"i": 9})
            stored.append({"i": 9})
            backend = await bucket.reopen(backend)
            assert await backend.get() == stored, f"call {index}: {files.calls[-1]}"
            await bucket.close()
        if not reached:
            return
    pytest.fail("a put makes no end of calls")


async def test_an_opening_that_fails_at_any_call_can_be_tried_again(tmp_path: Path) -> None:
    template = Bucket(WAL_SYNCED, tmp_path / "template")
    for index in range(MANY):
        folder = tmp_path / str(index)
        backend = template.kind.cls(0, str(folder), enable_wal=True, flush_interval=None)
        await backend.put({"i": 0})
        await backend.flush()
        await backend.put({"i": 1, "new": [1.5, 2.5]})
        del backend
        await until_freed(folder)
        with fs.use(FaultyFileSystem()) as files:
            assert isinstance(files, FaultyFileSystem)
            files.fail_once_at(index)
            bucket = Bucket(WAL_SYNCED, folder)
            try:
                backend = bucket.open()
            except StorageError:
                backend = None
            reached = not files.heal()
            backend = backend or bucket.open()
            rows = await backend.get()
            assert [r["i"] for r in rows] == [0, 1], f"call {index}: {files.calls[-1]}"
            await bucket.close()
        if not reached:
            return
    pytest.fail("an opening makes no end of calls")
