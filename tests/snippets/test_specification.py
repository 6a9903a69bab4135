"""Every snippet of the specification runs as it is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.specification import Around, Snippet, is_signature, snippets

ALL = snippets()
RUNNABLE = [snippet for snippet in ALL if not is_signature(snippet.code)]
SIGNATURES = [snippet for snippet in ALL if is_signature(snippet.code)]


def test_the_documents_hold_what_is_counted_here() -> None:
    assert len({snippet.document for snippet in ALL}) == 5
    assert len(RUNNABLE) == 30


@pytest.mark.parametrize("snippet", RUNNABLE, ids=str)
async def test_snippet(snippet: Snippet, system: Any, tmp_path: Path, capsys: Any) -> None:
    around = Around(system, tmp_path, snippet.code)
    names = await around.run(snippet.document)
    if "records" in names:
        assert names["records"]
    if "stats" in names:
        assert names["stats"]["total_count"] >= 0
        assert str(names["stats"]["persisted_count"]) in capsys.readouterr().out
    if "available" in names:
        assert {"memory", "my_backend"} <= set(names["available"])
        assert names["backend_class"] is names["MyBackendClass"]
    if around.processed:
        assert around.processed[-1]["late"]
        assert len(around.processed) >= 100
    if '"enable_wal": True' in snippet.code:
        assert (await names["writer"].stats())["wal_enabled"] is True
    if "storage_path" in snippet.code and "put(" in snippet.code:
        await names["writer"].flush()
        assert list(tmp_path.glob("*/*/bucket_*/data.lance")) or list(
            tmp_path.glob("*/bucket_*/data.lance")
        )


@pytest.mark.parametrize("snippet", SIGNATURES, ids=str)
async def test_a_printed_signature_is_ours(snippet: Snippet) -> None:
    """The methods that are shown exist, with these parameters, in this order."""
    import ast
    import inspect

    import persisting.queue as ours

    known = {"put", "put_batch", "get", "get_stream", "flush", "stats", "total_count"}
    for node in ast.walk(ast.parse(snippet.code)):
        if isinstance(node, ast.ClassDef):
            assert isinstance(getattr(ours, node.name), type)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.name in {*known, "__init__"}
            shown = [argument.arg for argument in node.args.args]
            owners = [ours.LanceBackend, ours.PersistingBackend, ours.StorageBackend]
            if node.name == "__init__":
                owners = [ours.PersistingBackend if "enable_wal" in shown else ours.LanceBackend]
            for owner in owners:
                has = list(inspect.signature(getattr(owner, node.name)).parameters)
                assert has[: len(shown)] == shown
