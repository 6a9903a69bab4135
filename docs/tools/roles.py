"""A mkdocs hook that shows a role such as ``:func:`a.b.write_queue``` as ``write_queue``."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub(r"<code>\1</code>", html)
