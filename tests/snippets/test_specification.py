"""Every snippet of the specification runs verbatim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.specification import Snippet, SnippetContext, is_signature, snippets

ALL = snippets()
RUNNABLE = [snippet for snippet in ALL if not is_signature(snippet.code)]
SIGNATURES = [snippet for snippet in ALL if is_signature(snippet.code)]


def test_the_specification_has_five_documents_and_thirty_runnable_snippets() -> None:
    assert len({snippet.document for snippet in ALL}) == 5
    assert len(RUNNABLE) == 30


@pytest.mark.parametrize("snippet", RUNNABLE, ids=str)
async def test_snippet_of_the_specification_runs(
    snippet: Snippet, system: Any, tmp_path: Path, capsys: Any
) -> None:
    context = SnippetContext(system, tmp_path, snippet.code)
    names = await context.run(snippet.document)
    if "records" in names:
        assert names["records"]
    if "stats" in names:
        assert names["stats"]["total_count"] >= 0
        assert str(names["stats"]["persisted_count"]) in capsys.readouterr().out
    if "available" in names:
        assert {"memory", "my_backend"} <= set(names["available"])
        assert names["backend_class"] is names["MyBackendClass"]
    if context.processed:
        assert context.processed[-1]["late"]
        assert len(context.processed) >= 100
    if '"enable_wal": True' in snippet.code:
        assert (await names["writer"].stats())["wal_enabled"] is True
    if "storage_path" in snippet.code and "put(" in snippet.code:
        await names["writer"].flush()
        assert list(tmp_path.glob("*/*/bucket_*/data.lance")) or list(
            tmp_path.glob("*/bucket_*/data.lance")
        )


@pytest.mark.parametrize("snippet", SIGNATURES, ids=str)
async def test_signature_in_the_specification_matches_our_classes(snippet: Snippet) -> None:
    """Each method exists with the same parameters in the same order."""
    import ast
    import inspect

    import persisting.queue as public

    methods = {"put", "put_batch", "get", "get_stream", "flush", "stats", "total_count"}
    for node in ast.walk(ast.parse(snippet.code)):
        if isinstance(node, ast.ClassDef):
            assert isinstance(getattr(public, node.name), type)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.name in {*methods, "__init__"}
            shown = [argument.arg for argument in node.args.args]
            owners = [public.LanceBackend, public.PersistingBackend, public.StorageBackend]
            if node.name == "__init__":
                owners = [
                    public.PersistingBackend if "enable_wal" in shown else public.LanceBackend
                ]
            for owner in owners:
                parameters = list(inspect.signature(getattr(owner, node.name)).parameters)
                assert parameters[: len(shown)] == shown
