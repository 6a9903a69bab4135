"""What a text search looks for: words, phrases, beginnings of words, words with typing errors.

A query has three lists of *phrases*: required, optional and excluded ones. A phrase is one or more
*terms* next to each other. A record matches if it has all required phrases, or, if there are none,
one of the optional phrases, and no excluded phrase.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from persisting.errors import InvalidArgument
from persisting.table.text_analysis import Word, query_words

MATCHES = ("any", "all", "phrase", "query")
MAX_ERRORS = 2

WORD, PREFIX, FUZZY, RUN = "word", "prefix", "fuzzy", "run"

_UNIT = re.compile(r'([+-]?)(?:"([^"]*)("?)(\S*)|(\S+))')
_MISPLACED = "text={text!r}: a * can only stand at the end of a word or phrase"
_SUFFIX = re.compile(r"^(.*?)(\*|~[0-9]*)$", re.DOTALL)


@dataclass(frozen=True)
class Term:
    """One word to look for."""

    kind: str
    text: str
    typed: str = ""
    errors: int = 0
    """For ``fuzzy``: how many letters may be missing, added or wrong."""


Phrase: TypeAlias = "tuple[Term, ...]"


@dataclass(frozen=True)
class TextQuery:
    """The phrases of a query. Required and optional ones add to the score of a record."""

    required: tuple[Phrase, ...] = ()
    optional: tuple[Phrase, ...] = ()
    excluded: tuple[Phrase, ...] = ()

    @property
    def scoring(self) -> tuple[Phrase, ...]:
        """The phrases that add to the score."""
        return (*self.required, *self.optional)

    @property
    def phrases(self) -> tuple[Phrase, ...]:
        return (*self.scoring, *self.excluded)


def parse(text: Any, match: Any = "any", fuzziness: Any = 0) -> TextQuery:
    """Return the query that the arguments of a search describe, or raise."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidArgument(f"text must be words to search for, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgument(f"text={text!r} is not valid Unicode: {exc.reason}") from exc
    check_how(match, fuzziness)
    if match == "query":
        return _parse_syntax(text, fuzziness)
    words = query_words(text)
    if match == "phrase":
        return TextQuery(required=_distinct([tuple(_terms(words, fuzziness))]))
    terms = _distinct((term,) for term in _terms(_bigrams(words), fuzziness))
    return TextQuery(required=terms) if match == "all" else TextQuery(optional=terms)


def check_how(match: Any, fuzziness: Any) -> None:
    """Raise unless these are a way to match and a number of typing errors."""
    if match not in MATCHES:
        raise InvalidArgument(f"match must be one of {', '.join(MATCHES)}, got {match!r}")
    if isinstance(fuzziness, bool) or fuzziness not in range(MAX_ERRORS + 1):
        raise InvalidArgument(
            f"fuzziness is the number of typing errors in a word, 0 to {MAX_ERRORS}, "
            f"got {fuzziness!r}"
        )


def _parse_syntax(text: str, fuzziness: int) -> TextQuery:
    """Parse words with ``+word -word "a phrase" begin* typo~``."""
    lists: dict[str, list[Phrase]] = {"+": [], "": [], "-": []}
    for sign, quoted, closed, rest, bare in _UNIT.findall(text):
        if bare:
            lists[sign] += _bare(text, sign, bare, 0 if sign == "-" else fuzziness)
            continue
        if not closed:
            raise InvalidArgument(f"text={text!r}: a quotation mark is missing after {quoted!r}")
        if rest:
            raise InvalidArgument(f"text={text!r}: put a space between the phrase and {rest!r}")
        lists[sign].append(_phrase(text, quoted))
    query = TextQuery(*(_distinct(lists[sign]) for sign in ("+", "", "-")))
    if query.excluded and not query.scoring:
        raise InvalidArgument(
            f"text={text!r} only excludes words; add a word that the records must have"
        )
    return query


def _bare(text: str, sign: str, bare: str, fuzziness: int) -> list[Phrase]:
    """Return the phrases of a word without quotation marks."""
    suffixed = _SUFFIX.match(bare)
    body, suffix = (suffixed[1], suffixed[2]) if suffixed else (bare, "")
    if "*" in body:
        raise InvalidArgument(_MISPLACED.format(text=text))
    words = query_words(body)
    if suffix == "*" and words:
        return [_phrase(text, bare)]
    if not suffix:
        if sign:
            return [tuple(_terms(words, fuzziness))]
        return [(term,) for term in _terms(_bigrams(words), fuzziness)]
    if not words:
        raise InvalidArgument(f"text={text!r}: there is no word before {suffix!r}")
    errors = int(suffix[1:] or 1)
    if not 1 <= errors <= MAX_ERRORS:
        raise InvalidArgument(f"text={text!r}: {suffix!r} must be ~, ~1 or ~{MAX_ERRORS}")
    if any(word.is_run for word in words):
        raise InvalidArgument(
            f"text={text!r}: {suffix!r} cannot follow Chinese, Japanese or Korean text"
        )
    return [tuple(_terms(words, errors))]


def _phrase(text: str, written: str) -> Phrase:
    """Return the words of a phrase; the last may end with ``*``."""
    body = written.removesuffix("*")
    if "*" in body:
        raise InvalidArgument(_MISPLACED.format(text=text))
    words = query_words(body)
    if body == written or not words:
        return tuple(_terms(words, 0))
    last = words[-1]
    # Runs match anywhere, so they need no beginning.
    return (*_terms(words[:-1], 0), Term(RUN if last.is_run else PREFIX, last.text))


def _terms(words: Iterable[Word], errors: int) -> list[Term]:
    terms = []
    for word in words:
        tolerated = 0 if word.is_run else min(errors, _tolerance(word.text))
        kind = RUN if word.is_run else FUZZY if tolerated else WORD
        terms.append(Term(kind, word.text, word.typed, tolerated))
    return terms


def _tolerance(word: str) -> int:
    """Return how many typing errors a word of this length may have: else it matches anything."""
    if len(word) <= 2:
        return 0
    return 1 if len(word) <= 5 else MAX_ERRORS


def _bigrams(words: Iterable[Word]) -> list[Word]:
    """Divide runs into pairs of characters: a run in a query may be a whole sentence."""
    divided = []
    for word in words:
        if word.is_run and len(word.text) > 2:
            pairs = [word.text[i : i + 2] for i in range(len(word.text) - 1)]
            divided += [Word(pair, pair, True) for pair in pairs]
        else:
            divided.append(word)
    return divided


def _distinct(phrases: Iterable[Phrase]) -> tuple[Phrase, ...]:
    """Return the phrases that have words, each once."""
    by_text = {tuple((t.kind, t.text, t.errors) for t in phrase): phrase for phrase in phrases}
    return tuple(phrase for phrase in by_text.values() if phrase)
