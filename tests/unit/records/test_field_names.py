"""The names that a field may have."""

from __future__ import annotations

import pytest

from persisting.errors import SchemaError
from persisting.records.field_names import ARRIVAL, check_name


@pytest.mark.parametrize("name", ["a", "a b", "_x", "数", "item", "x" * 1024, "a'\"b", "-", "**"])
def test_valid_field_names_are_accepted(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (1, "strings"),
        (None, "strings"),
        (b"a", "strings"),
        ("", "empty"),
        ("a.b", r"'\.'"),
        ("a`b", "'`'"),
        ("a\0b", "contains"),
        ("_rowid", "reserved"),
        ("_rowaddr", "reserved"),
        (ARRIVAL, "reserved"),
        ("_persisting_anything", "reserved"),
        ("*", "all fields"),
        ("\ud800", "unicode"),
        ("x" * 1025, "longer"),
        ("é" * 600, "longer"),
    ],
    ids=lambda v: repr(v)[:20],
)
def test_invalid_field_names_are_refused_with_a_reason(name: object, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        check_name(name)


def test_the_error_names_the_dict_that_contains_an_invalid_name() -> None:
    with pytest.raises(SchemaError, match=r"in 'user\.address'"):
        check_name("a.b", "user.address")
