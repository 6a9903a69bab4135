"""docs/guide/search.md lists the arguments, index kinds and numbers of the code."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from support.doc_pages import both, code, table_with

from persisting.backends.table_backend import TableBackend
from persisting.bucket import maintenance, snapshot_search
from persisting.table import indexes, search, text_analysis, text_query, text_search

pages = pytest.mark.parametrize("page", both("guide/search.md"), ids=["en", "zh"])


@pages
def test_search_page_lists_the_arguments_of_search(page: Path):
    parameters = list(inspect.signature(TableBackend.search).parameters.values())[1:]
    listed = [(code(row[0]), eval(code(row[1]))) for row in table_with(page, "k", "exact")]  # noqa: S307
    order = [one.name for one in parameters]
    assert sorted(listed, key=lambda one: order.index(one[0])) == [
        (one.name, one.default) for one in parameters
    ]


@pages
def test_search_page_lists_the_index_kinds_and_metrics(page: Path):
    kinds = [eval(code(row[0])) for row in table_with(page, '"vector"', '"btree"')]  # noqa: S307
    assert kinds == [None, *indexes.KINDS]
    metrics = [eval(code(row[0])) for row in table_with(page, '"l2"')]  # noqa: S307
    assert metrics == list(indexes.METRICS)


@pages
def test_search_page_lists_the_ways_to_match_and_the_languages(page: Path):
    matches = [eval(code(row[0])) for row in table_with(page, '"phrase"', '"query"')]  # noqa: S307
    assert matches == list(text_query.MATCHES)
    text = page.read_text("utf-8")
    assert all(f"`{language}`" in text for language in text_analysis.LANGUAGES)


@pages
def test_search_page_states_the_numbers_of_the_code(page: Path):
    text = page.read_text("utf-8")
    for number in (
        snapshot_search._MAX_RESULTS,
        indexes.LEAST_VECTORS,
        maintenance._BEHIND_ROWS,
        search._PROBED * indexes._PARTITION_ROWS,
        text_search._READ_WHOLLY,
    ):
        assert f"{number:,}" in text
    assert f"{100 // maintenance._BEHIND_SHARE} %" in text
    assert f"1 / ({snapshot_search._RANK_FUSION} + " in text
    assert f"{snapshot_search._CANDIDATES} × `k`" in text
    assert indexes._RETRAIN == 8
