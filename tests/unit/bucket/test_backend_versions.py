"""Tags and restores of a single backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError
from persisting.queue import LanceBackend
from persisting.table import files, repair


async def test_tag_of_an_empty_backend_is_refused(tmp_path: Path) -> None:
    async with LanceBackend(0, str(tmp_path)) as backend:
        with pytest.raises(StorageError, match="tag"):
            await backend.tag("x")


async def test_version_that_is_removed_while_it_is_opened_is_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = repair.load

    def load_removed(root: Path, version: int, *options: Any) -> Any:
        files.manifest_path(root, version).unlink()  # as the removal of old versions does
        return load(root, version, *options)

    async with LanceBackend(0, str(tmp_path)) as backend:
        for number in range(3):
            await backend.put({"id": number})
            await backend.flush()
        oldest = (await backend.versions())[0]["version"]
        monkeypatch.setattr(repair, "load", load_removed)
        with pytest.raises(InvalidArgument, match=f"version {oldest} of .* does not exist"):
            await backend.get(0, None, version=oldest)


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
