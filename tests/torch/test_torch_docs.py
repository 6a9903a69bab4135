"""The snippets and examples that need torch run, and print what their comments say."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.doc_pages import DOCS, blocks
from support.example_runner import run_example
from support.snippet_runner import Page
from support.training_topics import make_topic


def run(page: Path, languages: set[str]) -> None:
    running = Page(page)
    try:
        for block in blocks(page):
            if block.language in languages:
                running.run(block)
    finally:
        running.close()


def test_training_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(DOCS / "guide/training.md", {"python", "py"})


def test_torch_part_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def curated(number: int) -> dict[str, float]:
        return {"id": number, "x": number % 7 / 7, "y": number % 5 / 5, "reward": 0.5}

    make_topic(tmp_path / "queues", 1800, name="curated", tag="train-1", record=curated)
    run(DOCS / "tutorial/training.md", {"py"})


def test_loader_example_resumes_exactly(tmp_path: Path) -> None:
    output = run_example("train_dataloader.py", str(tmp_path))
    assert "every row was used once in each epoch: True" in output
