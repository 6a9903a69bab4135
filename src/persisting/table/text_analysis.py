"""How text is split into words, in records and in queries alike.

Lance's ICU tokenizer splits text at spaces, punctuation and changes of script; case and accents are
ignored. It also splits Chinese and Japanese with a dictionary, so that whether a word is found
would depend on the characters around it, and it leaves Korean endings attached. So such scripts are
matched by their characters instead: a *run* is a maximal sequence of them, and a word is found
anywhere in a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

LANGUAGES = (
    *("arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek"),
    *("hungarian", "italian", "norwegian", "portuguese", "romanian", "russian", "spanish"),
    *("swedish", "tamil", "turkish"),
)
"""Languages whose words Lance can reduce to their stems."""

_HAN = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
_KANA = (
    "\u3041-\u3096\u3099-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"
    "\u3100-\u312f\u31a0-\u31bf"
)
_HANGUL = "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7a3\ud7b0-\ud7fb\uffa0-\uffdc"
RUN = f"{_HAN}{_KANA}{_HANGUL}"
"""The characters of runs, as the content of a class in a regular expression."""

_RUNS = re.compile(f"([{RUN}]+)")
_WORDS = re.compile("[a-z0-9]+")
_LETTER = f"[\\p{{L}}\\p{{N}}\\p{{M}}&&[^{RUN}]]"
_JOINED = f"{_HANGUL}\u3099\u309a\uff9e\uff9f"
_MARKS = "[\\p{Cf}\\p{M}\\p{P}]*"

FOLDED = f"[\\p{{L}}\\p{{N}}\\p{{M}}&&[^\\x00-\\x7f{RUN}]]"
"""Characters that may become others, or several, when accents are removed (Rust syntax)."""

JOINED_WORDS = (
    f"[{_JOINED}]{_MARKS}{_LETTER}|{_LETTER}{_MARKS}[{_JOINED}]"
    f"|[{RUN}]{_MARKS}[\\p{{M}}\\p{{Thai}}\\p{{Lao}}\\p{{Khmer}}\\p{{Myanmar}}]|\\p{{M}}[{_KANA}]"
)
"""Text whose words the tokenizer joins with a run, as in ``API를`` (Rust syntax). An index has the
joined word only; so rows with such text are searched without it."""


def index_settings(language: str | None) -> dict[str, Any]:
    """Return the settings of a Lance text index. Positions are for phrases."""
    return {**_tokenizer(language), "with_position": True}


def _tokenizer(language: str | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "base_tokenizer": "icu/split",
        "lower_case": True,
        "ascii_folding": True,
        "stem": language is not None,
        "remove_stop_words": False,
        "max_token_length": None,
    }
    return settings if language is None else {**settings, "language": language.capitalize()}


def tokens(text: str, language: str | None = None) -> list[str]:
    """Split text as a Lance index does, with the stems of a language."""
    if language is None and text.isascii():
        return _WORDS.findall(text.lower())
    import lance

    return [token.text for token in lance.tokenize(text, **_tokenizer(language))]


class Document(NamedTuple):
    """The words and runs of a text, in order."""

    words: list[str]
    stems: list[str]
    """What words are compared by: their stems, or the words themselves without a language."""
    is_run: list[bool] | None
    """Which of the words are runs; None: none."""
    length: int
    """The number of words that Lance counts, which splits runs."""


def document(text: str, language: str | None) -> Document:
    """Split a text into words and runs."""
    if text.isascii():
        words = _WORDS.findall(text.lower())
        stems = words if language is None else [stem(word, language) for word in words]
        return Document(words, stems, None, len(words))
    words, stems, is_run = [], [], []
    for part, run in _parts(text):
        found = [part] if run else tokens(part)
        words += found
        stems += found if run or language is None else _stems(part, found, language)
        is_run += [run] * len(found)
    if not any(is_run):
        return Document(words, stems, None, len(words))
    return Document(words, stems, is_run, len(tokens(text)))


def length(text: str) -> int:
    """Return the number of words that Lance counts in a text."""
    return len(tokens(text))


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, and for each whether it is a run."""
    for number, part in enumerate(_RUNS.split(text)):
        if part:
            yield part, number % 2 == 1


def _stems(text: str, words: list[str], language: str) -> list[str]:
    stems = tokens(text, language)
    return stems if len(stems) == len(words) else [stem(word, language) for word in words]


@lru_cache(1 << 16)
def stem(word: str, language: str) -> str:
    """Return what a word is compared by in a language."""
    return next(iter(tokens(word, language)), word)


class Word(NamedTuple):
    """A word of a query: as compared, as typed, and whether it is a run."""

    text: str
    typed: str
    is_run: bool


_SEPARATORS = re.compile(r"[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f\s]+")


def query_words(text: str) -> list[Word]:
    """Split a query into words and runs."""
    found = []
    for part, run in _parts(text):
        if run:
            found.append(Word(part, part, True))
            continue
        for typed in filter(None, _SEPARATORS.split(part)):
            words = tokens(typed)
            # The stem of a word depends on its accents, so the index gets the word as typed.
            found += [Word(word, typed if len(words) == 1 else word, False) for word in words]
    return found
