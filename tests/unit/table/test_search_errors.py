"""What a search raises when its condition cannot be used."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from persisting.queue import InvalidArgument, LanceBackend


async def test_unknown_field_error_quotes_the_whole_condition_with_its_semicolons(
    tmp_path: Path,
) -> None:
    where = "text = 'a;b' AND missing = 1"
    async with LanceBackend(0, str(tmp_path / "b")) as backend:
        await backend.put({"text": "a;b"})
        with pytest.raises(InvalidArgument) as raised:
            await backend.query(where)
    assert str(raised.value) == f"where={where!r} names 'missing'; the fields are: 'text'"


@pytest.mark.parametrize("where", ["missing = 1", "part.missing = 1"])
async def test_unknown_field_error_can_be_sent_to_another_process(
    tmp_path: Path, where: str
) -> None:
    async with LanceBackend(0, str(tmp_path / "b")) as backend:
        await backend.put({"text": "a", "part": {"n": 1}})
        with pytest.raises(InvalidArgument) as raised:
            await backend.query(where)
    copy = pickle.loads(pickle.dumps(raised.value))  # noqa: S301
    assert type(copy) is type(raised.value)
    assert str(copy) == str(raised.value)


async def test_unknown_field_error_is_a_plain_invalid_argument(tmp_path: Path) -> None:
    async with LanceBackend(0, str(tmp_path / "b")) as backend:
        await backend.put({"text": "a"})
        with pytest.raises(InvalidArgument) as raised:
            await backend.query("missing = 1")
    assert type(raised.value) is InvalidArgument
