"""Every page of the site exists in both languages and is in the navigation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import DOCS, ROOT, chinese, english_pages

yaml = pytest.importorskip("yaml")  # installed with mkdocs and with Spark's pipelines


class Loader(yaml.SafeLoader):
    """Reads the YAML tags of mkdocs plugins as None."""


Loader.add_multi_constructor("", lambda *_: None)

CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)


def entries(nav: list[Any]) -> list[tuple[str, str | None]]:
    """Return the titles of the navigation with their pages; None for a section."""
    found: list[tuple[str, str | None]] = []
    for entry in nav:
        ((title, below),) = entry.items()
        if isinstance(below, str):
            found.append((title, below))
        else:
            found += [(title, None), *entries(below)]
    return found


ENTRIES = entries(CONFIG["nav"])


def plugin(name: str) -> dict[str, Any]:
    return next(one[name] for one in CONFIG["plugins"] if isinstance(one, dict) and name in one)


def test_every_page_is_in_the_navigation_once():
    listed = [page for _, page in ENTRIES if page]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in english_pages())


@pytest.mark.parametrize("page", [page for _, page in ENTRIES if page])
def test_every_page_of_the_navigation_exists_in_both_languages(page: str):
    assert (DOCS / page).is_file()
    assert chinese(DOCS / page).is_file()


def test_every_chinese_page_has_an_english_page():
    for page in DOCS.rglob("*.zh.md"):
        assert page.with_name(page.name.replace(".zh.md", ".md")).is_file(), page


def test_every_title_of_the_navigation_is_translated():
    (zh,) = [one for one in plugin("i18n")["languages"] if one["locale"] == "zh"]
    assert set(zh["nav_translations"]) == {title for title, _ in ENTRIES}


_WORDS = re.compile(r"^[A-Z(][\w,' ]* [a-z]{3,} [a-z]{3,} [a-z]{3,}")


def test_chinese_pages_have_no_lines_of_english_prose():
    for page in sorted(DOCS.rglob("*.zh.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
        left = [line for line in text.splitlines() if _WORDS.match(line)]
        assert not [line for line in left if not re.search("[\u4e00-\u9fff]", line)], page


def test_every_picture_of_the_pages_exists():
    for page in [*ROOT.glob("README*.md"), *DOCS.rglob("*.md")]:
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text("utf-8")):
            assert (page.parent / link).is_file(), f"{page}: {link}"


def test_demo_picture_needs_nothing_from_the_network():
    picture = Path(DOCS / "assets/demo.svg").read_text("utf-8")
    assert "Every claim held" in picture.replace("&#160;", " ")
    assert not re.search(r"url\(.?http|<image|<script|@import", picture)


def test_demo_picture_shows_what_the_demo_prints():
    spec = importlib.util.spec_from_file_location("demo_svg", DOCS / "tools/demo_svg.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    output = (
        "\x1b[1m1. Three agents\x1b[0m\n\n  \x1b[32m✓\x1b[0m all are there\n"
        f"\x1b[1m{tool.ENDS}\x1b[0m\n  a chart\n"
        "\x1b[1mEvery claim held\x1b[0m, in 40 s. Look yourself:\n"
    )
    picture = tool.picture(output).replace("&#160;", " ")
    for part in ("1. Three agents", "all are there", "Every claim held", ", in 40 s."):
        assert part in picture
    assert "a chart" not in picture
