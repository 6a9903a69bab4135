"""What a search raises when its condition cannot be used."""

from __future__ import annotations

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
