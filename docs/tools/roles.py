"""A mkdocs hook: shows ``:func:`persisting.queue.write_queue``` as the function's short name."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub(r"<code>\1</code>", html)
