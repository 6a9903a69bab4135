"""Loads Arrow without pandas, for processes that belong to persisting alone.

Before it converts its first value, PyArrow imports pandas where it is installed, so that it can
recognize a Series. That takes several times as long as loading Lance. Commands and Spark's planning
processes are short-lived and never see a Series. A process of the user must not do this: PyArrow
would then take a Series for a plain sequence.
"""

from __future__ import annotations

import sys


class _HiddenPandas:
    """Finds every module but pandas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not needed here", name=name)


def load_without_pandas() -> None:
    """Load what Lance needs of Arrow without pandas, unless one of them is already loaded."""
    if "pandas" in sys.modules or "pyarrow.dataset" in sys.modules:
        return
    hidden = _HiddenPandas()
    sys.meta_path.insert(0, hidden)
    try:
        # Creates an expression, before which PyArrow looks for pandas, once.
        import pyarrow.dataset  # noqa: F401
    finally:
        sys.meta_path.remove(hidden)
