"""Which process runs which tests, when several do (``make test``)."""

from __future__ import annotations

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling

SPARK = "spark"

_LONGEST_FIRST = (SPARK, "cluster", "store", "local_socket", "ui", "work", "crash", "docs", "cli")
"""Folders whose files are slow: begun last, one of them would run alone at the end."""


class FileScheduling(LoadScopeScheduling):
    """Keeps the tests of a file in one process, and all tests of Spark, which then starts once.

    xdist's own ``--dist loadgroup`` does not work with pytest 9.2: it marks names of tests that
    pytest no longer reads, and every test becomes a group of its own.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return SPARK if SPARK in PurePath(path).parts else path


def order(path: PurePath) -> int:
    """Return the place of a file among all: slow ones come first."""
    found = [n for n, folder in enumerate(_LONGEST_FIRST) if folder in path.parts]
    return min(found, default=len(_LONGEST_FIRST))
