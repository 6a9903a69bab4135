"""The snippet runner detects wrong output."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.doc_pages import Block
from support.snippet_runner import Page


def run(*snippets: str) -> None:
    page = Page(Path("page.md"))
    try:
        for text in snippets:
            page.run(Block("python", text, 10))
    finally:
        page.close()


def test_snippets_of_a_page_share_names_and_event_loop():
    run(
        "import asyncio\nx = await asyncio.sleep(0, 5)\nlock = asyncio.Lock()\n",
        "async with lock:\n    print(x)  # 5\n",
    )


@pytest.mark.parametrize(
    "text",
    ["print(1)  # 2\n", "for i in range(2):\n    print(i)\n# 0\n# 2\n", "print(1)\n# 1\n# 2\n"],
)
def test_wrong_snippet_output_fails_and_names_the_line(text: str):
    with pytest.raises(AssertionError, match=r"page\.md:1[01] prints"):
        run(text)


def test_snippet_with_its_own_event_loop_runs():
    run("import asyncio\n\nasync def main():\n    print(7)  # 7\n\nasyncio.run(main())\n")
