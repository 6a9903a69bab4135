"""Inject faults below the library and Lance, with a shared object loaded before libc."""

from __future__ import annotations

import errno
import mmap
import os
import sysconfig
from enum import IntFlag
from pathlib import Path

from support.compiling import shared_object

SOURCE = Path(__file__).with_name("injector.c")
CONTROL, ROOT = "TORTURE_CONTROL", "TORTURE_ROOT"
_FIELDS = ("countdown", "code", "lasting", "calls", "delay", "clock", "fired")
_WORD = 8


class Calls(IntFlag):
    """Calls that can fail."""

    WRITE = 1
    SYNC = 2
    OPEN = 4
    NAME = 8
    READ = 16


CODES = {"enospc": errno.ENOSPC, "eio": errno.EIO, "emfile": errno.EMFILE}
AFFECTED_CALLS = {
    "enospc": Calls.WRITE | Calls.NAME,
    "eio": Calls.WRITE | Calls.SYNC | Calls.READ,
    "emfile": Calls.OPEN,
}


def build(folder: Path) -> Path:
    """Compile the shared object into ``folder`` and return its path."""
    return shared_object(SOURCE, folder / f"injector{sysconfig.get_config_var('SHLIB_SUFFIX')}")


class Control:
    """The memory-mapped control file; the controlled process reads it at every call."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(len(_FIELDS) * _WORD))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), len(_FIELDS) * _WORD)
        self.heal()

    @classmethod
    def of_this_process(cls) -> Control | None:
        path = os.environ.get(CONTROL)
        return None if path is None else cls(Path(path))

    def _set(self, name: str, value: int) -> None:
        at = _FIELDS.index(name) * _WORD
        self._map[at : at + _WORD] = value.to_bytes(_WORD, "little", signed=True)

    @property
    def fired(self) -> int:
        at = _FIELDS.index("fired") * _WORD
        return int.from_bytes(self._map[at : at + _WORD], "little", signed=True)

    def inject(self, fault: str, after: int, *, lasting: bool) -> None:
        """Fail the call after ``after`` further calls; if ``lasting``, all later calls too."""
        self._set("code", CODES[fault])
        self._set("calls", AFFECTED_CALLS[fault])
        self._set("lasting", lasting)
        self._set("countdown", after)

    def heal(self) -> None:
        self._set("calls", 0)
        self._set("countdown", -1)

    def slow(self, seconds: float) -> None:
        """Delay every call by ``seconds``."""
        self._set("delay", int(seconds * 1e6))

    def shift_clock(self, seconds: int) -> None:
        """Shift the time of day by ``seconds`` from now on."""
        self._set("clock", seconds)


def environment(library: Path, root: Path, control: Path) -> dict[str, str]:
    return {"LD_PRELOAD": str(library), ROOT: str(root), CONTROL: str(control)}
