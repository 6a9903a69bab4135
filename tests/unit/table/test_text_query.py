"""The query syntax of a text search, and how text is split into words."""

from __future__ import annotations

import pytest

from persisting.errors import InvalidArgument
from persisting.table.text_analysis import LANGUAGES, document, tokens
from persisting.table.text_query import Phrase, TextQuery, parse
from persisting.table.text_scoring import within


def shown(phrases: tuple[Phrase, ...]) -> list[str]:
    """Return phrases in a short form: kind and text of each term."""
    signs = {"word": "", "prefix": "*", "run": "#", "fuzzy": "~"}
    return [
        " ".join(f"{t.text}{signs[t.kind]}{t.errors or ''}" for t in phrase) for phrase in phrases
    ]


def parts(query: TextQuery) -> tuple[list[str], list[str], list[str]]:
    return shown(query.required), shown(query.optional), shown(query.excluded)


@pytest.mark.parametrize(
    ("text", "required", "optional", "excluded"),
    [
        ("lost update", [], ["lost", "update"], []),
        ("+lost update", ["lost"], ["update"], []),
        ("lost -draft", [], ["lost"], ["draft"]),
        ('"Lost update" +"a b"', ["a b"], ["lost update"], []),
        ('-"a b" c', [], ["c"], ["a b"]),
        ("trans*", [], ["trans*"], []),
        ("+trans* -un*", ["trans*"], [], ["un*"]),
        ("updaet~", [], ["updaet~1"], []),
        ("updaet~2 abc~2 ab~", [], ["updaet~2", "abc~1", "ab"], []),
        ("e-mail", [], ["e", "mail"], []),
        ("+e-mail", ["e mail"], [], []),
        ("a -e-mail", [], ["a"], ["e mail"]),
        ("wi-fi*", [], ["wi fi*"], []),
        ('"lost upd*"', [], ["lost upd*"], []),
        ('+"打开 登*"', ["打开# 登#"], [], []),
        ("a - b", [], ["a", "b"], []),
        ("Naïve NAIVE", [], ["naive"], []),
        ("登录", [], ["登录#"], []),
        ("登录页面", [], ["登录#", "录页#", "页面#"], []),
        ("+登录页面", ["登录页面#"], [], []),
        ("登录*", [], ["登录#"], []),
        ("打开login", [], ["打开#", "login"], []),
        ('"登录 page"', [], ["登录# page"], []),
        ("C++ 1.0~rc1", [], ["c", "1", "0", "rc1"], []),
        ("!!!", [], [], []),
    ],
)
def test_query_syntax_is_parsed(
    text: str, required: list[str], optional: list[str], excluded: list[str]
) -> None:
    assert parts(parse(text, "query")) == (required, optional, excluded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a "b c', "a quotation mark is missing after 'b c'"),
        ('"a b"~2', "put a space between the phrase and '~2'"),
        ("-draft", "only excludes words; add a word"),
        ('-"a b"', "only excludes words"),
        ("*ing", "can only stand at the end"),
        ("a*b", "can only stand at the end"),
        ('"a* b"', "can only stand at the end of a word or phrase"),
        ("a ~", "there is no word before '~'"),
        ("*", "there is no word before"),
        ("word~3", "must be ~, ~1 or ~2"),
        ("登录~", "cannot follow Chinese, Japanese or Korean text"),
    ],
)
def test_mistakes_in_a_query_are_explained(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message.replace("*", r"\*")):
        parse(text, "query")


def test_marks_of_the_syntax_are_punctuation_in_other_modes() -> None:
    assert parts(parse('+a -b "c d" e* f~', "any")) == ([], ["a", "b", "c", "d", "e", "f"], [])
    assert parts(parse("+a -b", "all")) == (["a", "b"], [], [])
    assert parts(parse('"a" b', "phrase")) == (["a b"], [], [])


def test_fuzziness_tolerates_more_errors_in_longer_words() -> None:
    assert parts(parse("ab abc abcdef 登录", "any", 2))[1] == ["ab", "abc~1", "abcdef~2", "登录#"]
    assert parts(parse("abcdef", "all", 1))[0] == ["abcdef~1"]
    assert parts(parse('word -other "a phrase"', "query", 1)) == (
        [],
        ["word~1", "a phrase"],
        ["other"],
    )


@pytest.mark.parametrize("text", [None, 3, "", "  ", b"word"])
def test_searched_text_must_be_words(text: object) -> None:
    with pytest.raises(InvalidArgument, match="text must be words"):
        parse(text)


def test_text_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="is not valid Unicode"):
        parse("caf\ud800")


def test_unknown_ways_to_match_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="match must be one of any, all, phrase, query"):
        parse("a", "some")
    for wrong in (3, -1, True, "1", None):
        with pytest.raises(InvalidArgument, match="fuzziness is the number of typing errors"):
            parse("a", "any", wrong)


def test_runs_are_separated_from_words_and_by_punctuation() -> None:
    doc = document("打开Login页面，输入 API를 3월", None)
    assert doc.words == ["打开", "login", "页面", "输入", "api", "를", "3", "월"]
    assert doc.is_run == [True, False, True, True, False, True, False, True]


def test_every_listed_language_has_stems() -> None:
    for language in LANGUAGES:
        assert tokens("word", language)
    assert document("Running dogs 登录", "english").stems == ["run", "dog", "登录"]
    assert document("running dogs", "english").words == ["running", "dogs"]


@pytest.mark.parametrize(
    ("word", "other", "errors"),
    [("login", "login", 0), ("login", "logn", 1), ("login", "lo gin", 1), ("login", "lgoin", 2)],
)
def test_distance_between_words_counts_added_missing_and_wrong_letters(
    word: str, other: str, errors: int
) -> None:
    assert within(word, other, errors)
    assert within(other, word, errors)
    assert errors == 0 or not within(word, other, errors - 1)
