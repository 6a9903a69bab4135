"""Parts of the console that need no server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from persisting.ui import value_trees
from persisting.ui.charts import line_chart, sparkline
from persisting.ui.series import KEPT_SECONDS, Point, Series
from persisting.ui.texts import Translator, language_of
from persisting.ui.texts_zh import CHINESE

UI = Path(value_trees.__file__).parent
STATES = ["running", "done", "failed", "stopped", "verify", "compact", "retain", "backup"]
PLURALS = re.compile(r'\b_\.n\([^"]*"([^"]+)",\s*"([^"]+)"')
LOGS = ["empty", "whole", "torn", "damaged", "missing", "unused"]


def texts() -> set[str]:
    """Return every text that templates and screens translate."""
    found = set(STATES + LOGS)
    for file in UI.rglob("*.html"):
        found |= {many for _, many in PLURALS.findall(file.read_text())}
        found |= set(re.findall(r"\b_\(\s*[\"']([^\"']+)[\"']", file.read_text()))
    for file in UI.rglob("*.py"):
        found |= set(re.findall(r"translate\(\s*\"([^\"]+)\"", file.read_text()))
    return found


def test_every_text_has_a_chinese_translation_with_the_same_placeholders() -> None:
    assert texts() == set(CHINESE)
    for english, chinese in CHINESE.items():
        assert re.findall(r"{\w+}", english) == [] or set(re.findall(r"{\w+}", english)) == set(
            re.findall(r"{\w+}", chinese)
        )


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("", "en"),
        ("zh", "zh"),
        ("zh-TW,en;q=0.5", "zh"),
        ("en-US,en;q=0.9,zh;q=0.8", "en"),
        ("de,zh;q=0.2", "zh"),
        ("fr,de", "en"),
        ("zh;q=nonsense", "en"),
    ],
)
def test_language_of_a_page_follows_the_accept_language_header(header: str, language: str) -> None:
    assert language_of(header) == language
    assert language_of(header, "zh") == "zh"
    assert language_of(header, "xx") == language


def test_counts_have_a_singular_and_a_plural_in_english_only() -> None:
    forms = "{count} record", "{count} records"
    english, chinese = Translator("en"), Translator("zh")
    assert [english.n(n, *forms) for n in (0, 1, 2_000)] == [
        "0 records",
        "1 record",
        "2,000 records",
    ]
    assert [chinese.n(n, *forms) for n in (1, 2_000)] == ["1 条记录", "2,000 条记录"]
    for file in UI.rglob("*.html"):
        for one, many in PLURALS.findall(file.read_text()):
            assert set(re.findall(r"{\w+}", one)) == set(re.findall(r"{\w+}", many))
            assert one != many


def test_series_keeps_an_hour_and_merges_equal_values() -> None:
    series = Series()
    for second in range(0, 10_000, 5):
        series.add(second, 7)
    assert len(series) == 2
    for second in range(10_000, 20_000, 5):
        series.add(second, second)
    assert len(series) <= KEPT_SECONDS / 5 + 2
    assert series.last == 19_995
    assert all(point.value == 1 for point in series.rates(19_000))


def test_rate_of_a_series_that_shrinks_is_zero() -> None:
    series = Series()
    series.add(0, 100)
    series.add(10, 50)
    series.add(20, 70)
    assert [point.value for point in series.rates()] == [0, 0, 2]


def test_charts_escape_their_titles() -> None:
    points = [Point(0, 1), Point(1, 2)]
    chart = line_chart('<script>"', points, 0, 1, "<b>")
    assert "<script>" not in chart
    assert "<b>" not in chart
    assert sparkline(points[:1], 0, 1) == ""


def test_tree_bounds_large_records() -> None:
    deep: object = "x"
    for _ in range(50):
        deep = [deep]
    node = value_trees.tree({"wide": list(range(100_000)), "deep": deep, "text": "y" * 10**6})
    wide, deep_node, text = node.children
    assert len(wide.children) == 201
    assert wide.children[-1].kind == "cut"
    assert deep_node.kind == "list"
    assert len(text.text) + len(text.rest) == value_trees.LONG_TEXT
    many = value_trees.tree({str(n): {"a": 1} for n in range(5_000)})
    assert many.children[-1].kind == "cut"


def test_vectors_need_finite_numbers() -> None:
    assert value_trees.is_vector([0.0, 1.0, 2.0, 3.0])
    assert not value_trees.is_vector([0.0, float("nan"), 2.0, 3.0])
    assert not value_trees.is_vector([1, 2, 3, 4])
    assert not value_trees.is_vector([0.0, 1.0])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1e200, -1e200, 1e308, 0.0], "vector"),
        ([1e308] * 8, "vector"),
        ([None, 1.0, 2.0, 3.0], "list"),
        ([float("nan"), float("inf"), 2.0, 3.0], "list"),
        ([5e-324] * 4, "vector"),
    ],
)
def test_vector_of_extreme_numbers_is_shown(values: list[float | None], kind: str) -> None:
    (node,) = value_trees.tree({"v": values}).children
    assert node.kind == kind
    assert value_trees.brief(values)
    assert "nan" not in node.plot


def test_highlighted_words_are_escaped() -> None:
    marked = value_trees.highlighted("a <b>lock</b> here", ["LOCK", "<b>"])
    assert "<mark>lock</mark>" in marked
    assert "<b>" not in marked


def test_image_types_exclude_svg() -> None:
    assert value_trees.image_type(b"\xff\xd8\xff\xe0") == "image/jpeg"
    assert value_trees.image_type(b"RIFF....WEBP") == "image/webp"
    assert value_trees.image_type(b"<svg xmlns=") is None
