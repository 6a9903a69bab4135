"""Python names that the pages mention exist, so that a moved module is noticed."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
from support.doc_pages import DOCS, ROOT

# Names of two parts, such as `persisting.format`, may be property keys of a table.
_NAME = re.compile(r"\bpersisting(?:\.\w+){2,}")


@pytest.mark.parametrize(
    "page",
    [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("README*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_dotted_name_of_a_page_exists(page: Path):
    for name in sorted(set(_NAME.findall(page.read_text("utf-8")))):
        try:
            resolve_name(name)
        except (AttributeError, ModuleNotFoundError) as error:
            raise AssertionError(f"{page}: there is no {name}") from error
