"""Snippets can be typed or pasted at the prompt of ``python -m asyncio``, as the pages say.

A prompt needs an empty line after each block.
"""

from __future__ import annotations

import ast
from codeop import CommandCompiler
from pathlib import Path

import pytest
from support.doc_pages import DOCS, Block, blocks, both, english_pages

IN_A_FILE = "class JsonLines:"
"""The only snippet that its page saves in a file."""


def stray_lines(block: Block) -> list[int]:
    """Return the lines of the page that the prompt refuses, or after which it waits for more."""
    compiler = CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    typed: list[str] = []
    refused = []
    for number, line in enumerate(block.text.splitlines(), block.line):
        typed.append(line)
        try:
            done = compiler("\n".join(typed), "<prompt>", "single") is not None
        except SyntaxError:
            refused.append(number)
            done = True
        if done:
            typed = []
    return refused + ([number] if typed else [])


def with_enter(block: Block) -> Block:
    return Block(block.language, block.text + "\n", block.line)


@pytest.mark.parametrize("page", english_pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_snippets_can_be_typed_at_a_prompt(page: Path):
    for block in blocks(page):
        if block.language == "python" and IN_A_FILE not in block.text:
            assert not stray_lines(with_enter(block)), page


@pytest.mark.parametrize(
    "page",
    [
        *both("tutorial/first-queue.md"),
        *both("tutorial/first-pipeline.md"),
        *both("tutorial/sql.md"),
    ],
    ids=lambda page: page.name,
)
def test_tutorial_snippets_can_be_pasted_one_after_another(page: Path):
    assert "python -m asyncio" in page.read_text("utf-8")
    for block in blocks(page):
        if block.language == "python":
            assert not stray_lines(block), page


def test_custom_backend_page_says_to_save_its_class_in_a_file():
    for page in both("guide/custom-backends.md"):
        before, snippet, _ = page.read_text("utf-8").partition(IN_A_FILE)
        assert snippet
        assert "from jsonl import *" in before


def test_prompt_refuses_a_statement_right_after_a_block():
    assert stray_lines(Block("python", "for n in range(3):\n    print(n)\nprint(4)\n", 10)) == [12]
    assert stray_lines(Block("python", "for n in range(3):\n    print(n)\n\nprint(4)\n", 10)) == []
    assert stray_lines(Block("python", "for n in range(3):\n    print(n)\n", 10)) == [11]
    assert stray_lines(Block("python", "await use()\n", 10)) == []
