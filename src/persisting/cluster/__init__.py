"""Topics on a Pulsing cluster: every bucket is owned by one node and reached through its actor.

``placement`` who should own what · ``host`` the owning side · ``service`` one bucket's calls ·
``peers`` calls to other nodes · ``client`` the using side · ``wire`` the bytes between them ·
``opening`` how writers and readers get there · ``exits`` leaving the interpreter cleanly.
"""

from __future__ import annotations

from typing import Any

from persisting.errors import StorageError


def __getattr__(name: str) -> Any:
    if name == "serve":
        try:
            from persisting.cluster.host import serve
        except ModuleNotFoundError as exc:
            if exc.name != "pulsing":
                raise
            raise StorageError(
                f"Pulsing is not installed ({exc}): pip install 'persisting[pulsing]'"
            ) from exc
        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
