"""Hints for names and conditions that a user may have meant."""

from __future__ import annotations

import pytest

from persisting.suggestions import choices, did_you_mean, field_hint, nearest, quotes_hint

FIELDS = ["Package", "Version", "Installed-Size", "Description", "sub field"]


@pytest.mark.parametrize(
    ("given", "best"),
    [
        ("Pakage", "Package"),
        ("package", "Package"),
        ("pkg", "Package"),
        ("Desc", "Description"),
        ("installed_size", "Installed-Size"),
    ],
)
def test_nearest_name_comes_first(given: str, best: str) -> None:
    assert nearest(given, FIELDS)[0] == best


def test_name_unlike_all_others_has_no_suggestion() -> None:
    assert nearest("zzz", FIELDS) == []
    assert did_you_mean("zzz", FIELDS) == ""
    assert nearest("", FIELDS) == []


def test_at_most_three_names_are_suggested() -> None:
    assert len(nearest("field", [f"field{n}" for n in range(50)])) == 3


def test_choices_list_the_first_names_and_count_the_others() -> None:
    assert choices("zzz", []) == "there are: none yet"
    assert choices("zzz", ["a", "b"]) == "there are: 'a', 'b'"
    many = choices("zzz", [f"f{n}" for n in range(53)])
    assert many.endswith("'f7' and 45 more")
    assert choices("Pakage", FIELDS) == "did you mean 'Package'?"


@pytest.mark.parametrize(
    ("where", "name", "hint"),
    [
        ("Installed-Size > 1000", "Installed", "write the name in backticks: `Installed-Size`"),
        ("sub field = 1", "sub", "write the name in backticks: `sub field`"),
        ("Installed_Size > 1", "Installed_Size", "did you mean `Installed-Size`?"),
        ("Pakage = 'x'", "Pakage", "did you mean 'Package'?"),
        ("Package = zzz", "zzz", "write text in single quotes: 'zzz'"),
        ("Package IN (zzz, 'b')", "zzz", "write text in single quotes: 'zzz'"),
        ("'Installed-Size' = zzz1 + 1", "zzz1", "write text in single quotes: 'zzz1'"),
    ],
)
def test_condition_with_an_unknown_name_gets_a_hint(where: str, name: str, hint: str) -> None:
    assert field_hint(where, name, FIELDS) == hint


def test_condition_with_a_name_unlike_all_fields_lists_them() -> None:
    assert field_hint("zzz > 1", "zzz", ["a", "b"]) == "the fields are: 'a', 'b'"


def test_text_that_begins_with_a_digit_needs_quotes() -> None:
    assert quotes_hint("Package=0ad") == "write text in single quotes: '0ad'"
    assert quotes_hint("Package LIKE 7zip%") == "write text in single quotes: '7zip'"
    assert quotes_hint("Package = '0ad' AND") == ""
    assert quotes_hint("n = 10") == ""
