"""Spark sessions in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

CONFIGURING = ("JAVA_HOME", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "MASTER")


class Run:
    """A program that runs in an empty folder, with its own temporary and cache folders."""

    def __init__(
        self, folder: Path, code: str, *args: object, command: list[str] | None = None, **env: str
    ) -> None:
        self.cwd, self.temporary, self.cache = (folder / n for n in ("cwd", "tmp", "cache"))
        for place in (self.cwd, self.temporary, self.cache):
            place.mkdir()
        self._result = folder / "result.json"
        program = folder / "program.py"
        program.write_text(code + _STORE_RESULT.format(result=str(self._result)))
        self.environ = {
            **plain_environment(),
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(self.cache),
            **env,
        }
        self.process = subprocess.Popen(
            [*(command or [sys.executable]), str(program), *map(str, args)],
            cwd=self.cwd,
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    def finish(self) -> Run:
        """Wait until the program, and the Java that shares its stdout, have ended."""
        self.stdout, self.stderr = self.process.communicate()
        return self

    @property
    def result(self) -> dict[str, Any]:
        """Return the program's variable ``result``."""
        assert self.process.returncode == 0, self.stderr
        result: dict[str, Any] = msgspec.json.decode(self._result.read_bytes())
        return result


_STORE_RESULT = """
import msgspec, pathlib
pathlib.Path({result!r}).write_bytes(msgspec.json.encode(result))
"""


def plain_environment() -> dict[str, str]:
    """Return the environment without variables that configure Java or Spark."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in CONFIGURING and not name.startswith(("SPARK_", "PYSPARK_"))
    }


def path_without_java(folder: Path) -> str:
    """Return a PATH with all programs of the current one except Java."""
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if program.name != "java" and not program.is_dir():
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return str(folder)


def spark_home(folder: Path) -> Path:
    """Link the installed Spark into a new folder: workers of a local cluster write below it."""
    import pyspark

    folder.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":  # written by another local cluster
            (folder / entry.name).symlink_to(entry)
    return folder
