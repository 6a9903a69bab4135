"""Tags and restores of a single backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from persisting.errors import OffsetOutOfRange, StorageError
from persisting.queue import LanceBackend


async def test_tag_of_an_empty_backend_is_refused(tmp_path: Path) -> None:
    async with LanceBackend(0, str(tmp_path)) as backend:
        with pytest.raises(StorageError, match="tag"):
            await backend.tag("x")


async def test_open_stream_raises_when_a_restore_removes_its_position(tmp_path: Path) -> None:
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"id": 0})
        await backend.tag("x")
        await backend.put({"id": 1})
        stream = backend.get_stream(block=True)
        assert [await anext(stream), await anext(stream)] == [{"id": 0}, {"id": 1}]
        await backend.restore("x")
        with pytest.raises(OffsetOutOfRange, match="offset 1"):
            await anext(stream)
