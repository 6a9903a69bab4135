"""The Python snippets of the specification, and the names that its text presumes."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path("/work/shared/seeds")
RECORDS = 120


@dataclass(frozen=True)
class Snippet:
    document: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def snippets() -> list[Snippet]:
    """Return every Python block, in the order of the documents."""
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        text = path.read_text()
        for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
            line = text.count("\n", 0, block.start()) + 2
            found.append(Snippet(path.stem[:3], line, block[1]))
    return found


def is_signature(code: str) -> bool:
    """Whether a block only shows the signatures of classes or methods."""
    return all(
        isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.parse(code).body
    )


class StreamStopped(Exception):
    """Ends a snippet's endless loop over a stream."""


class SnippetContext:
    """Runs a snippet with the names that its document introduced before it."""

    def __init__(self, system: Any, folder: Path, code: str) -> None:
        self.system, self.folder, self.code = system, folder, code
        self.processed: list[dict[str, Any]] = []
        self._late_put: asyncio.Task[None] | None = None
        self._opened: list[Any] = []

    async def names(self, document: str) -> dict[str, Any]:
        import persisting
        from persisting.queue import LanceBackend, StorageError, read_queue, write_queue

        names: dict[str, Any] = {
            "Any": Any,
            "AsyncIterator": AsyncIterator,
            "LanceBackend": LanceBackend,
            "StorageError": StorageError,
            "persisting": persisting,
            "system": self.system,
            "process": self.process,
            "write_queue": write_queue,
            "read_queue": read_queue,
        }
        if "MyBackendClass" in self.code:
            from support.protocol_only_backend import OnlyProtocol

            names["MyBackendClass"] = OnlyProtocol
        if "writer." in self.code and "writer =" not in self.code:
            names["writer"] = await self._writer("presumed", self._backend(document))
        for topic in ("example", "my_topic"):
            if f'read_queue(system, "{topic}")' in self.code and "writer =" not in self.code:
                await self._put_with_a_late_record(topic, self._backend(document))
        return names

    def _backend(self, document: str) -> str:
        return "persisting" if document == "002" else "lance"

    async def _writer(self, topic: str, backend: str) -> Any:
        from persisting.queue import write_queue

        writer = await write_queue(
            self.system, topic=topic, backend=backend, storage_path=str(self.folder)
        )
        self._opened.append(writer)
        return writer

    async def _put_with_a_late_record(self, topic: str, backend: str) -> None:
        """Put some records now, and one more while a stream waits."""
        writer = await self._writer(topic, backend)
        await writer.put([{"id": str(number), "late": False} for number in range(RECORDS)])

        async def put_late() -> None:
            await asyncio.sleep(1.0)
            await writer.put({"id": "late", "late": True})

        self._late_put = asyncio.create_task(put_late())

    def process(self, record: dict[str, Any]) -> None:
        self.processed.append(record)
        if record.get("late"):
            raise StreamStopped

    async def run(self, document: str) -> dict[str, Any]:
        """Run the code with only its paths changed; return its global names."""
        names = await self.names(document)
        code = self.code.replace('"/data', f'"{self.folder}')
        compiled = compile(code, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        try:
            result = eval(compiled, names)  # noqa: S307
            if inspect.iscoroutine(result):
                await asyncio.wait_for(result, 60)
        except StreamStopped:
            pass
        finally:
            if self._late_put is not None:
                await self._late_put
        return names
