"""``count``, the limit of ``query``, and hints for names that do not exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli_contracts import decoded
from support.cli_runner import CRASHING, Answer, filled


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A storage folder with a topic of ragged records."""
    first = {"id": 1, "Package": "0ad", "Installed-Size": 2000, "meta": {"a": 1, "b": None}}
    filled(tmp_path / "q", "packages", [first, {"id": 2, "Package": "abc", "Extra": "x"}])
    return tmp_path / "q"


def test_count_counts_all_records_or_those_that_match(
    storage: Path, call: Callable[..., Answer]
) -> None:
    assert call("count", "events", "-s", storage) == (0, "20\n", "")
    assert call("count", "events", "n >= 15", "-s", storage).out == "5\n"
    one = sum(int(call("count", "events", "-b", b, "-s", storage).out) for b in (0, 1))
    assert one == 20
    printed = call("count", "events", "n < 0", "--json", "-s", storage).out
    assert (decoded("count", printed).topic, decoded("count", printed).count) == ("events", 0)
    code, out, err = call("count", "events", "nope = 1", "-s", storage)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_count_includes_what_a_crashed_owner_left_in_its_log(
    crashed: Path, call: Callable[..., Answer]
) -> None:
    assert CRASHING
    assert call("count", "t", "-s", crashed).out == "5\n"
    assert call("count", "t", "n > 2", "-s", crashed).out == "2\n"


def test_query_says_how_many_more_records_match(storage: Path, call: Callable[..., Answer]) -> None:
    code, out, err = call("query", "events", "n >= 5", "--limit", 10, "-s", storage)
    assert (code, out.count("\n")) == (0, 10)
    assert err == "note: 5 more records matched; to show all, pass --limit 15\n"
    code, out, err = call("query", "events", "n >= 5", "--limit", 15, "-s", storage)
    assert (code, out.count("\n"), err) == (0, 15, "")
    assert call("query", "events", "n < 0", "-s", storage) == (0, "", "")


def test_fields_without_a_value_are_shown_only_on_request(
    packages: Path, call: Callable[..., Answer]
) -> None:
    words = ["packages", "id = 2", "--json", "-s", packages]
    assert decoded("query", call("query", *words).out)[0].record == {
        "id": 2,
        "Package": "abc",
        "Extra": "x",
    }
    whole = decoded("query", call("query", *words, "--nulls").out)[0].record
    assert whole["Installed-Size"] is None
    assert whole["meta"] is None
    nested = call("query", "packages", "id = 1", "--json", "-s", packages).out
    assert decoded("query", nested)[0].record["meta"] == {"a": 1}
    found = call("search", "packages", "-t", "abc", "-f", "Package", "--json", "-s", packages).out
    assert "meta" not in decoded("search", found)[0].record


@pytest.mark.parametrize(
    ("condition", "hint"),
    [
        ("Installed-Size > 1000", "write the name in backticks: `Installed-Size`"),
        ("Package=0ad", "write text in single quotes: '0ad'"),
        ("Package = abcd", "write text in single quotes: 'abcd'"),
        ("Pakage = 'abc'", "did you mean 'Package'?"),
    ],
)
def test_wrong_condition_gets_a_hint(
    packages: Path, call: Callable[..., Answer], condition: str, hint: str
) -> None:
    code, out, err = call("query", "packages", condition, "-s", packages)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert hint in err


def test_unknown_names_suggest_the_nearest(packages: Path, call: Callable[..., Answer]) -> None:
    for command in ("get", "query"):
        code, _, err = call(command, "packages", "-c", "Pakage", "-s", packages)
        assert code == 2
        assert "did you mean 'Package'?" in err
        assert "Installed-Size" not in err
    code, _, err = call("get", "pkgs", "-s", packages)
    assert code == 3
    assert "did you mean 'packages'?" in err
    assert "did you mean 'topics'?" in call("topcs").err
    code, _, err = call("topics", "-s", packages / "nowhere")
    assert code == 1
    assert "there is no folder" in err
    missing = call("get", "x", "-s", packages / "nowhere")
    assert (missing.code, "there is no such folder" in missing.err) == (3, True)


def test_search_names_its_option_if_several_fields_qualify(
    packages: Path, call: Callable[..., Answer]
) -> None:
    code, _, err = call("search", "packages", "-t", "abc", "-s", packages)
    assert (code, "name the text field to search (--column)" in err) == (2, True)


def test_many_fields_are_not_all_listed(tmp_path: Path, call: Callable[..., Answer]) -> None:
    filled(tmp_path, "wide", [{"id": 1, **{f"f{n:02}": n for n in range(60)}}])
    _, _, err = call("get", "wide", "-c", "zzz", "-s", tmp_path)
    assert "and 53 more" in err


def test_owner_on_a_node_is_shown_with_a_short_id() -> None:
    from persisting.cli.commands.topics import _owner

    owner = {"pid": 7, "host": "h", "node": "326346341633692388071162120243815900028"}
    assert _owner({**owner, "address": "127.0.0.1:1"}) == "pid 7@h (node 32634634 127.0.0.1:1)"
