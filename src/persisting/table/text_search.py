"""Finds the rows of a view that match a text query: through Lance's index where it can answer, else
by reading the field.

The index answers for words and phrases, and for typing errors if its words are not stems. Runs and
beginnings of words are found by reading: Lance selects the rows that can match by a regular
expression, after the condition of the search, and :mod:`text_scoring` decides about those.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.table import text_analysis
from persisting.table.lance_errors import indices_of
from persisting.table.text_query import FUZZY, RUN, WORD, Phrase, Term, TextQuery
from persisting.table.text_scoring import Key, Matches, Statistics, TextMatcher
from persisting.table.view import TableView

_ADDRESS, _SCORE = "_rowaddr", "_score"
_READ_WHOLLY = 4096
"""Views of this many rows are read completely, so that all their words are counted. Of larger ones,
only rows that can match are read, and the mean length of a text is that of a sample."""

_FEW = 8
"""If a condition leaves one row in this many, those rows are read without selecting further."""

_SAMPLE = 512
_SELECTIVE = 64
"""A condition with more terms than this would cost more than it saves."""

_ALL_EXPANSIONS = 1 << 20

_ROWS_AT_ONCE = 1 << 16
_BYTES_AT_ONCE = 32 * 1024 * 1024
_JOINED_CACHE = 1 << 16
_MEAN_LENGTHS_CACHE = 256

Scan = Callable[[TableView, dict[str, Any]], Iterator[pa.RecordBatch]]
"""Yields the rows of a view that a Lance scan with these options finds."""


@dataclass(frozen=True)
class TextRequest:
    """A text search in one field. ``index`` is the name of the field's index, if it has one."""

    column: str
    query: TextQuery
    k: int
    where: str | None = None
    language: str | None = None
    index: str | None = None


@dataclass
class TextHits:
    """What was found in a view: offsets with scores of Lance, or matches that need a score."""

    scored: list[tuple[float, int]] = field(default_factory=list)
    matches: list[Matches] = field(default_factory=list)
    statistics: Callable[[Iterable[Key]], Statistics] = lambda keys: Statistics()
    """Returns the word counts of the view; at least those of the given words are right."""


def find(view: TableView, request: TextRequest, scan: Scan) -> TextHits:
    """Return the rows of a view that match; ``scan`` reads rows and translates errors."""
    if view.dataset is None or not view.rows or not request.query.scoring:
        return TextHits()
    if request.column not in view.dataset.schema.names:
        return TextHits()
    everything = [fragment.id for fragment in view.fragments]
    covered = _answered_by_index(view, request, scan)
    if not covered:
        return _by_reading(view, request, scan, everything)
    indexed = _through_index(view, request, scan, covered)
    later = [number for number in everything if number not in covered]
    if not later:
        return indexed
    # Lance also scans later rows, but looks there only for words that the index has.
    read = _by_reading(view, request, scan, later)

    def statistics(keys: Iterable[Key]) -> Statistics:
        return indexed.statistics(keys) + read.statistics(keys)

    return TextHits(indexed.scored, read.matches, statistics)


def _answered_by_index(view: TableView, request: TextRequest, scan: Scan) -> set[int]:
    """Return the fragments for which the index can answer the query."""
    if not all(_is_native(phrase, request.language) for phrase in request.query.phrases):
        return set()
    index = next((i for i in indices_of(view.dataset) if i.name == request.index), None)
    if index is None:
        return set()
    numbers = {number for segment in index.segments for number in segment.fragment_ids}
    covered = {fragment.id for fragment in view.fragments} & numbers
    return set() if _have_joined_words(view, covered, request.column, scan) else covered


def _is_native(phrase: Phrase, language: str | None) -> bool:
    if len(phrase) == 1 and phrase[0].kind == FUZZY:
        return language is None
    return all(term.kind == WORD for term in phrase)


def _have_joined_words(view: TableView, numbers: set[int], column: str, scan: Scan) -> bool:
    """Whether fragments have words that the index holds only joined with others.

    Data files never change, so each is read once in the life of a process.
    """
    fragments = [fragment for fragment in view.fragments if fragment.id in numbers]
    keys = {f.id: (column, *(file.path for file in f.files)) for f in fragments}
    joined = {number: _joined[key] for number, key in keys.items() if key in _joined}
    missing = [number for number in keys if number not in joined]
    if missing:
        condition = _matches(column, text_analysis.JOINED_WORDS)
        batches = scan(view, _filtered(_columns() | _only(view, missing), condition))
        with_joined = {row >> 32 for batch in batches for row in batch.column(_ADDRESS).to_pylist()}
        joined |= {number: number in with_joined for number in missing}
        if len(_joined) + len(missing) > _JOINED_CACHE:
            _joined.clear()
        _joined.update({keys[number]: joined[number] for number in missing})
    return any(joined.values())


_joined: dict[tuple[str, ...], bool] = {}


# Through the index


def _through_index(
    view: TableView, request: TextRequest, scan: Scan, covered: set[int]
) -> TextHits:
    def matching(query: Any, options: dict[str, Any]) -> list[tuple[float, int]]:
        """Return the scores and addresses of the rows that match."""
        options |= _columns(_SCORE) | {"full_text_query": query, "fast_search": True}
        return [
            pair
            for batch in scan(view, options)
            for pair in zip(
                batch.column(_SCORE).to_pylist(), batch.column(_ADDRESS).to_pylist(), strict=True
            )
        ]

    found = matching(_lance_query(request), _filtered({"limit": request.k}, request.where))
    offsets = _offsets(view, [address for _, address in found])

    def statistics(keys: Iterable[Key]) -> Statistics:
        words = {key: _lance_match(Term(WORD, key[1], key[1]), request.column) for key in keys}
        counts = {key: len(matching(word, {})) for key, word in words.items()}
        rows = _rows(view, covered)
        return Statistics(rows, rows * _mean_length(view, request.column), Counter(counts))

    scored = [(score, offset) for (score, _), offset in zip(found, offsets, strict=True)]
    return TextHits(scored, statistics=statistics)


def _lance_query(request: TextRequest) -> Any:
    import lance

    fts = lance.query
    query, column = request.query, request.column
    plain = all(len(p) == 1 and p[0].kind == WORD for p in query.scoring)
    if plain and not query.excluded and not (query.required and query.optional):
        # One query of all words is faster than one for each.
        words = " ".join(term.typed for (term,) in query.scoring)
        operator = fts.FullTextOperator.AND if query.required else fts.FullTextOperator.OR
        return fts.MatchQuery(words, column, operator=operator)
    parts = [(fts.Occur.MUST, _lance_phrase(p, column)) for p in query.required]
    parts += [(fts.Occur.SHOULD, _lance_phrase(p, column)) for p in query.optional]
    exact = [term for phrase in query.scoring for term in phrase if term.kind == FUZZY]
    parts += [(fts.Occur.SHOULD, fts.MatchQuery(term.typed, column)) for term in exact]
    parts += [(fts.Occur.MUST_NOT, _lance_phrase(p, column)) for p in query.excluded]
    return fts.BooleanQuery(parts)


def _lance_phrase(phrase: Phrase, column: str) -> Any:
    import lance

    if len(phrase) == 1:
        return _lance_match(phrase[0], column)
    return lance.query.PhraseQuery(" ".join(term.typed for term in phrase), column)


def _lance_match(term: Term, column: str) -> Any:
    import lance

    return lance.query.MatchQuery(
        term.typed, column, fuzziness=term.errors, max_expansions=_ALL_EXPANSIONS
    )


# By reading


def _by_reading(
    view: TableView, request: TextRequest, scan: Scan, fragments: list[int]
) -> TextHits:
    """Match the rows that meet the condition, and that can match if there are many."""
    rows = _rows(view, fragments)
    selected = None if rows <= _READ_WHOLLY else _selection(request)
    if selected is not None and request.where is not None:
        # Lance tests both conditions on every row, and the regular expression costs more.
        only = _filtered(_columns() | _only(view, fragments), request.where)
        remaining = sum(batch.num_rows for batch in scan(view, only))
        if remaining <= max(_READ_WHOLLY, rows // _FEW):
            selected = None
    condition = request.where
    if selected is not None:
        condition = selected if condition is None else f"({condition}\n) AND {selected}"
    options = _filtered(_only(view, fragments), condition) | _columns(request.column)
    matcher = TextMatcher(request.query, request.language)
    matches: list[Matches] = []
    for texts, addresses in _collected(scan(view, options), request.column):
        offsets = np.array(view.offsets_of(addresses), np.int64)
        found = matcher.match(texts)
        matches += [part._replace(places=offsets[part.places]) for part in found]
    statistics = matcher.statistics
    if selected is not None and any(len(part.places) for part in matches):
        mean = _mean_length(view, request.column)
        statistics = Statistics(rows, rows * mean, statistics.frequencies)
    return TextHits(matches=matches, statistics=lambda keys: statistics)


def _collected(
    batches: Iterator[pa.RecordBatch], column: str
) -> Iterator[tuple[pa.Array, pa.ChunkedArray]]:
    """Yield texts and row addresses, many rows at a time."""
    waiting: list[pa.RecordBatch] = []
    nbytes = rows = 0
    for batch in batches:
        waiting.append(batch)
        nbytes, rows = nbytes + batch.nbytes, rows + batch.num_rows
        if rows >= _ROWS_AT_ONCE or nbytes >= _BYTES_AT_ONCE:
            yield _texts_and_addresses(waiting, column)
            waiting, nbytes, rows = [], 0, 0
    if waiting:
        yield _texts_and_addresses(waiting, column)


def _texts_and_addresses(
    batches: list[pa.RecordBatch], column: str
) -> tuple[pa.Array, pa.ChunkedArray]:
    rows = pa.Table.from_batches(batches).combine_chunks()
    return pa.concat_arrays(rows.column(column).chunks), rows.column(_ADDRESS)


def _mean_length(view: TableView, column: str) -> float:
    """Return the mean number of words of a sample of texts from all parts of the view."""
    assert view.dataset is not None
    key = view.dataset.uri, view.version, column
    mean = _mean_lengths.get(key)
    if mean is None:
        mean = _sampled_mean_length(view, column)
        if len(_mean_lengths) >= _MEAN_LENGTHS_CACHE:
            _mean_lengths.clear()
        _mean_lengths[key] = mean
    return mean


_mean_lengths: dict[tuple[str, int, str], float] = {}


def _sampled_mean_length(view: TableView, column: str) -> float:
    step = max(1, view.rows // _SAMPLE)
    rows = view.take(range(view.start, view.end, step), [column])
    texts = [text for text in rows.column(column).to_pylist() if text is not None]
    return sum(map(text_analysis.length, texts)) / max(1, len(texts))


def _selection(request: TextRequest) -> str | None:
    """Return an SQL condition that all matching rows meet, None if there is no useful one."""
    query = request.query
    if sum(map(len, query.scoring)) > _SELECTIVE:
        return None
    if query.required:
        required = [_pattern(term, request) for phrase in query.required for term in phrase]
        return _all_of(request.column, required)
    alternatives = []
    for phrase in query.optional:
        patterns = [pattern for term in phrase if (pattern := _pattern(term, request))]
        if not patterns:
            return None
        alternatives.append(max(patterns, key=len))
    return _matches(request.column, "|".join(dict.fromkeys(alternatives)))


def _all_of(column: str, patterns: list[str | None]) -> str | None:
    conditions = [_matches(column, pattern) for pattern in dict.fromkeys(patterns) if pattern]
    return " AND ".join(conditions) or None


def _pattern(term: Term, request: TextRequest) -> str | None:
    """Return a regular expression that every text with a term matches, None if there is none."""
    if term.kind == RUN:
        return re.escape(term.text)
    if term.kind == WORD and request.language is not None:
        return None  # a word may differ from its stem in any letter
    pieces = [term.text]
    if term.kind == FUZZY:
        # Each error is in one piece, so one more piece than errors leaves one without.
        size = -(-len(term.text) // (term.errors + 1))
        pieces = [term.text[i : i + size] for i in range(0, len(term.text), size)]
        if len(pieces) <= term.errors:
            return None
    return f"(?i:{'|'.join(map(re.escape, pieces))})|{text_analysis.FOLDED}"


def _rows(view: TableView, numbers: Iterable[int]) -> int:
    """Return the number of rows in fragments of a view."""
    chosen = set(numbers)
    sizes = zip(view.fragments, view.sizes, strict=True)
    return sum(size.rows for fragment, size in sizes if fragment.id in chosen)


def _only(view: TableView, numbers: list[int]) -> dict[str, Any]:
    """Return the option that limits a scan to some fragments."""
    assert view.dataset is not None
    if len(numbers) == len(view.fragments):
        return {}
    return {"fragments": [view.dataset.get_fragment(number) for number in numbers]}


def _offsets(view: TableView, addresses: list[int]) -> list[int]:
    return view.offsets_of(pa.chunked_array([pa.array(addresses, pa.uint64())]))


def _matches(column: str, pattern: str) -> str:
    quoted = pattern.replace("'", "''")
    return f"regexp_like(`{column}`, '{quoted}')"


def _columns(*names: str) -> dict[str, Any]:
    return {"columns": list(names), "with_row_address": True}


def _filtered(options: dict[str, Any], condition: str | None) -> dict[str, Any]:
    if condition is None:
        return options
    return options | {"filter": f"({condition}\n)", "prefilter": True}
