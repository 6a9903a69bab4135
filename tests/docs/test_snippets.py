"""Every Python snippet of the README and of the pages runs and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.doc_pages import DOCS, ROOT, blocks, both, chinese, english_pages, tables
from support.snippet_runner import Page

PAGES = [ROOT / "README.md", *english_pages()]


@pytest.mark.timeout(900)  # some pages start Spark
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run_and_print_what_their_comments_say(page: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    running = Page(page)
    try:
        for block in blocks(page):
            if block.language == "python":
                running.run(block)
    finally:
        running.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_write_to_no_absolute_path(page: Path):
    for block in blocks(page):
        if block.language == "python":
            assert not re.search(r"""path\s*=\s*f?["']/""", block.text), f"{page}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_chinese_page_exists_and_has_the_same_snippets(page: Path):
    assert chinese(page).is_file(), f"{chinese(page)} is missing"
    ours = [(block.language, block.text) for block in blocks(page)]
    theirs = [(block.language, block.text) for block in blocks(chinese(page))]
    assert ours == theirs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_chinese_page_has_the_same_tables_and_headings(page: Path):
    def shape(path: Path) -> tuple[list[str], list[int]]:
        prose = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
        levels = [line.split(" ")[0] for line in prose.splitlines() if line.startswith("#")]
        rows = [line.count("|") for line in prose.splitlines() if line.startswith("|")]
        return levels, rows

    assert shape(page) == shape(chinese(page))


def guarantees(page: Path) -> list[list[str]]:
    """Return the rows of the table of guarantees, without remarks in parentheses."""
    table = next(t for t in tables(page) if "`kill -9`" in t[0])
    return [[re.sub(r" \(.*?\)", "", cell) for cell in row] for row in table]


READMES = [ROOT / "README.md", ROOT / "README.zh.md"]


@pytest.mark.parametrize(
    ("readme", "page"),
    list(zip(READMES, both("guide/durability.md"), strict=True)),
    ids=["en", "zh"],
)
def test_readme_and_durability_page_state_the_same_guarantees(readme: Path, page: Path):
    assert guarantees(readme) == guarantees(page)


@pytest.mark.parametrize("readme", READMES, ids=["en", "zh"])
def test_every_file_linked_from_the_readme_exists(readme: Path):
    for link in re.findall(r"\]\(([^)#]+)\)", readme.read_text("utf-8")):
        assert link.startswith("https://") or (ROOT / link).exists(), link


@pytest.mark.parametrize("readme", READMES, ids=["en", "zh"])
def test_readme_links_to_every_page(readme: Path):
    """Each README links to the pages in its own language."""
    links = set(re.findall(r"\]\((docs/[^)#]+\.md)\)", readme.read_text("utf-8")))
    chosen = chinese if readme.name.endswith(".zh.md") else Path
    pages = {str(chosen(page).relative_to(ROOT)) for page in english_pages()}
    assert links == pages - {str(chosen(DOCS / "index.md").relative_to(ROOT))}
