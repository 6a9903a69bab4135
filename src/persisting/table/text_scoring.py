"""Matches texts with a query and ranks them by BM25, without an index.

The formula, and what counts as a word, are those of Lance's index, so the same records are found
with the same scores with an index and without. Texts are matched many at a time: each distinct word
is compared once, and the rest is arithmetic on arrays of word numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persisting.table.text_analysis import Document, document, stem, tokens
from persisting.table.text_query import FUZZY, PREFIX, RUN, WORD, Phrase, Term, TextQuery

_SATURATION = 1.2
_LENGTH_WEIGHT = 0.75

Array: TypeAlias = "npt.NDArray[np.int64]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"
Key: TypeAlias = "tuple[str, str]"
"""What is counted: the kind and text of a term, or a word that a term with errors stands for."""


@dataclass
class Statistics:
    """Word counts of the searched texts: how many there are, their length, how many have what."""

    texts: int = 0
    words: float = 0.0
    frequencies: Counter[Key] = field(default_factory=Counter)

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.texts + other.texts,
            self.words + other.words,
            self.frequencies + other.frequencies,
        )

    def weight(self, key: Key) -> float:
        """Return how much a word counts: the rarer, the more."""
        count = self.frequencies[key]
        return math.log(1 + (max(self.texts, count) - count + 0.5) / (count + 0.5))

    @property
    def mean_length(self) -> float:
        return max(1.0, self.words / max(1, self.texts))


class Matches(NamedTuple):
    """Texts that match: their places and lengths, and what they have of the query.

    ``texts``, ``keys`` and ``counts`` are parallel: a text, a key, and how many times the text has
    it.
    """

    places: Array
    lengths: Array
    names: list[Key]
    texts: Array
    keys: Array
    counts: Array

    def scores(self, statistics: Statistics) -> npt.NDArray[np.float64]:
        weights = np.array([statistics.weight(name) for name in self.names], np.float64)
        relative = self.lengths / statistics.mean_length
        norms = _SATURATION * (1 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * relative)
        parts = weights[self.keys] * self.counts * (_SATURATION + 1)
        parts /= self.counts + norms[self.texts]
        return np.bincount(self.texts, parts, len(self.places)).astype(np.float64)


class _Entry(NamedTuple):
    """A distinct word: as written, what it is compared by, and whether it is a run."""

    word: str
    stem: str
    is_run: bool


class _Texts(NamedTuple):
    """Texts as numbers: of each word its text and its number in ``entries``."""

    places: Array
    lengths: Array
    entries: list[_Entry]
    texts: Array
    words: Array


class TextMatcher:
    """Matches texts with one query, and counts their words as it goes."""

    def __init__(self, query: TextQuery, language: str | None) -> None:
        self._query, self._language = query, language
        self.statistics = Statistics()
        self._terms = list(dict.fromkeys(term for phrase in query.phrases for term in phrase))
        self._tests = {term: _test(term, language) for term in self._terms}

    def match(self, texts: pa.Array) -> list[Matches]:
        """Return the matches of an array of texts; a place is the position in the array."""
        places = np.arange(len(texts))
        ascii_only = np.asarray(pc.fill_null(pc.string_is_ascii(texts), False))
        other = np.asarray(pc.is_valid(texts)) & ~ascii_only
        parts = []
        if ascii_only.any():
            chosen = texts.filter(pa.array(ascii_only))
            parts.append(_plain_texts(chosen, places[ascii_only], self._language))
        if other.any():
            documents = (
                document(text, self._language) for text in texts.filter(pa.array(other)).to_pylist()
            )
            parts.append(_mixed_texts(documents, places[other]))
        return [self._match(part) for part in parts]

    def _match(self, texts: _Texts) -> Matches:
        # Lance does not count texts without words either.
        counted = Statistics(int((texts.lengths > 0).sum()), float(texts.lengths.sum()))
        names: list[Key] = []
        occurrences = {}
        for term in self._terms:
            occurrences[term] = self._occurrences(term, texts, names)
            numbers, having = np.unique(occurrences[term][1], return_counts=True)
            for number, count in zip(numbers.tolist(), having.tolist(), strict=True):
                counted.frequencies[names[number]] = count  # two terms may stand for one word
        self.statistics += counted
        return self._chosen(texts, names, occurrences)

    def _occurrences(
        self, term: Term, texts: _Texts, names: list[Key]
    ) -> tuple[Array, Array, Array]:
        """Return texts, keys and counts of a term, and add its keys to ``names``."""
        test = self._tests[term]
        hits = [(number, n) for number, e in enumerate(texts.entries) if (n := test(e))]
        counts = np.zeros(len(texts.entries), np.int64)
        keys = np.zeros(len(texts.entries), np.int64)
        for number, count in hits:
            counts[number], keys[number] = count, len(names)
            if term.kind == FUZZY:  # each word counts by itself
                names.append((WORD, texts.entries[number].word))
        if hits and term.kind != FUZZY:
            names.append((term.kind, term.text))
        places = np.flatnonzero(counts[texts.words])
        words = texts.words[places]
        pairs = texts.texts[places] * max(1, len(names)) + keys[words]
        unique, inverse = np.unique(pairs, return_inverse=True)
        total = np.bincount(inverse, counts[words], len(unique)).astype(np.int64)
        return unique // max(1, len(names)), unique % max(1, len(names)), total

    def _chosen(
        self,
        texts: _Texts,
        names: list[Key],
        occurrences: dict[Term, tuple[Array, Array, Array]],
    ) -> Matches:
        """Return the texts that match the query, with what they have of its phrases."""
        query, size = self._query, len(texts.places)
        present = {phrase: self._present(phrase, texts, occurrences) for phrase in query.phrases}
        chosen = np.zeros(size, bool)
        if query.required:
            chosen = np.logical_and.reduce([present[phrase] for phrase in query.required])
        else:
            for phrase in query.optional:
                chosen |= present[phrase]
        for phrase in query.excluded:
            chosen &= ~present[phrase]
        numbers = np.cumsum(chosen) - 1
        parts: list[tuple[Array, Array, Array]] = []
        for phrase in query.scoring:
            for term in phrase:
                found, keys, counts = occurrences[term]
                kept = (chosen & present[phrase])[found]
                parts.append((numbers[found[kept]], keys[kept], counts[kept]))
                if term.kind == FUZZY and (WORD, term.text) in names:
                    # The word itself counts twice, so it is ranked above words with errors.
                    exact = kept & np.isin(keys, _numbers(names, (WORD, term.text)))
                    parts.append((numbers[found[exact]], keys[exact], counts[exact]))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Matches(texts.places[chosen], texts.lengths[chosen], names, *columns)

    def _present(
        self, phrase: Phrase, texts: _Texts, occurrences: dict[Term, tuple[Array, Array, Array]]
    ) -> Mask:
        """Return which texts have a phrase."""
        size = len(texts.places)
        present = np.zeros(size, bool)
        if len(phrase) == 1:
            present[occurrences[phrase[0]][0]] = True
            return present
        last = len(phrase) - 1
        starts = max(0, len(texts.words) - last)
        follows = texts.texts[:starts] == texts.texts[last:]
        for n, term in enumerate(phrase):
            test = _run_test(term.text, n, last) if term.kind == RUN else self._tests[term]
            fits = np.array([bool(test(entry)) for entry in texts.entries], bool)
            follows &= fits[texts.words[n : n + starts]]
        present[texts.texts[:starts][follows]] = True
        return present


def _numbers(names: Sequence[Key], name: Key) -> list[int]:
    return [number for number, other in enumerate(names) if other == name]


# Texts as numbers

_SEPARATED = bytes(c if chr(c).isascii() and chr(c).isalnum() else 32 for c in range(128)) + bytes(
    [32] * 128
)


def _plain_texts(texts: pa.Array, places: Array, language: str | None) -> _Texts:
    """Split texts of ASCII characters at everything that is not a letter or a digit."""
    texts = pc.ascii_lower(texts.cast(pa.large_string()))
    values = texts.buffers()[2].to_pybytes().translate(_SEPARATED)
    split = pa.LargeStringArray.from_buffers(
        len(texts), texts.buffers()[1], pa.py_buffer(values), None, 0, texts.offset
    )
    words = pc.ascii_split_whitespace(split)
    owners = np.asarray(pc.list_parent_indices(words)).astype(np.int64)
    flat = words.flatten()
    filled = np.asarray(pc.not_equal(flat, ""))  # a separator at an end leaves an empty word
    encoded = flat.filter(pa.array(filled)).dictionary_encode()
    owners = owners[filled]
    entries = [
        _Entry(word, word if language is None else stem(word, language), False)
        for word in encoded.dictionary.to_pylist()
    ]
    lengths = np.bincount(owners, minlength=len(texts)).astype(np.int64)
    numbers = np.asarray(encoded.indices).astype(np.int64)
    return _Texts(places, lengths, entries, owners, numbers)


def _mixed_texts(documents: Iterable[Document], places: Array) -> _Texts:
    numbers: dict[_Entry, int] = {}
    owners: list[int] = []
    words: list[int] = []
    lengths: list[int] = []
    for number, doc in enumerate(documents):
        runs = doc.is_run or [False] * len(doc.words)
        for entry in map(_Entry, doc.words, doc.stems, runs):
            words.append(numbers.setdefault(entry, len(numbers)))
        owners += [number] * len(doc.words)
        lengths.append(doc.length)
    arrays = (np.array(values, np.int64) for values in (lengths, owners, words))
    length, owner, word = arrays
    return _Texts(places, length, list(numbers), owner, word)


# Comparing words

_Test: TypeAlias = "Callable[[_Entry], int]"


def _test(term: Term, language: str | None) -> _Test:
    """Return a function that counts a term in a distinct word.

    Beginnings and typing errors concern words as they are written, not their stems.
    """
    if term.kind == RUN:
        return lambda entry: entry.word.count(term.text) if entry.is_run else 0
    if term.kind == PREFIX:
        return lambda entry: entry.word.startswith(term.text) and not entry.is_run
    if term.kind == FUZZY:
        return lambda entry: not entry.is_run and within(term.text, entry.word, term.errors)
    expected = term.text
    if language is not None:
        expected = next(iter(tokens(term.typed or term.text, language)), term.text)
    return lambda entry: entry.stem == expected and not entry.is_run


def _run_test(text: str, number: int, last: int) -> _Test:
    """Return a test for a run in a phrase: the run may begin before the phrase and end after it."""
    if number == 0:
        return lambda entry: entry.is_run and entry.word.endswith(text)
    if number == last:
        return lambda entry: entry.is_run and entry.word.startswith(text)
    return lambda entry: entry.is_run and entry.word == text


def within(word: str, other: str, errors: int) -> bool:
    """Whether a word becomes another by adding, removing or replacing this many letters or less."""
    if abs(len(word) - len(other)) > errors:
        return False
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, 1):
        diagonal, row[0] = row[0], i
        for j, against in enumerate(other, 1):
            cost = min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != against))
            diagonal, row[j] = row[j], cost
        if min(row) > errors:
            return False
    return row[-1] <= errors
