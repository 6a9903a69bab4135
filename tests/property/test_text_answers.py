"""A text search finds the same records wherever they are, in any mix of scripts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute_force import QUIET

from persisting.queue import PersistingBackend
from persisting.table import text_search

LATIN = [
    *("log", "login", "logins", "logout", "page", "pages", "open", "opened", "opening", "the"),
    *("naïve", "NAIVE", "Straße", "strasse", "e-mail", "email", "foo_bar", "don't", "3.14", "x"),
    *("Привет", "λόγος", "ﬁne", "ＦＵＬＬ", "café"),
]
ASIAN = [
    *("登录", "登录页面", "打开登录", "研究生命", "页", "密码。", "打开login页面", "第3章", "３月"),
    *("東京", "東京都に", "カタカナ", "ログイン", "로그인", "로그인을", "한글", "API를"),
]
TEXTS = st.lists(st.sampled_from([*LATIN, *ASIAN, ",", "，", "\n"]), max_size=9).flatmap(
    lambda words: st.sampled_from([" ", " ", ""]).map(lambda gap: gap.join(words))
)
UNITS = st.sampled_from([*LATIN, *ASIAN, "logi", "opne", "zzz"])
QUERIES = st.one_of(
    st.tuples(
        st.lists(UNITS, min_size=1, max_size=4).map(" ".join),
        st.sampled_from(["any", "all", "phrase"]),
        st.integers(0, 2),
    ),
    st.tuples(
        st.lists(
            st.tuples(
                st.sampled_from(["", "", "+", "-"]), UNITS, st.sampled_from(["", "", "*", "~", '"'])
            ),
            min_size=1,
            max_size=4,
        ).map(lambda units: " ".join(map(_unit, units))),
        st.just("query"),
        st.integers(0, 1),
    ),
)


def _unit(parts: tuple[str, str, str]) -> str:
    sign, word, suffix = parts
    if suffix == '"':
        return f'{sign}"{word} page"'
    if suffix == "~" and not word.isascii():
        return sign + word
    return sign + word + suffix


async def answers(backend: Any, queries: list[tuple[str, str, int]]) -> list[Any]:
    """Return each query's hits as record ids with scores; the text of an error for a bad query."""
    found: list[Any] = []
    for text, match, fuzziness in queries:
        try:
            hits = await backend.search(text=text, match=match, fuzziness=fuzziness, k=1000)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append({hit["id"]: hit["_score"] for hit in hits})
    return found


@pytest.mark.parametrize("language", [None, "english"])
@settings(max_examples=25)
@given(
    texts=st.lists(st.one_of(TEXTS, st.none()), min_size=1, max_size=30),
    queries=st.lists(QUERIES, min_size=1, max_size=8),
)
async def test_buffer_table_index_and_selected_rows_give_the_same_records_and_scores(
    tmp_path_factory: pytest.TempPathFactory,
    language: str | None,
    texts: list[str | None],
    queries: list[tuple[str, str, int]],
) -> None:
    folder = tmp_path_factory.mktemp("bucket")
    records = [{"id": i, "text": text, "other": i} for i, text in enumerate(["the end", *texts])]

    async with PersistingBackend(bucket_id=0, storage_path=folder / "a", **QUIET) as backend:
        await backend.put_batch(records)
        buffered = await answers(backend, queries)
        await backend.flush()
        stored = await answers(backend, queries)
        assert stored == buffered
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_search, "_READ_WHOLLY", 0)
            selected = await answers(backend, queries)
        assert [_set(found) for found in selected] == [_set(found) for found in buffered]
        await backend.create_index("text", language=language)
        indexed = await answers(backend, queries)

    half = len(records) // 2
    async with PersistingBackend(bucket_id=0, storage_path=folder / "b", **QUIET) as backend:
        await backend.put_batch(records[:half] or records)
        await backend.create_index("text", language=language)
        await backend.put_batch(records[half:] if half else [])
        partly = await answers(backend, queries)
        await backend.flush()
        uncovered = await answers(backend, queries)
    assert [_set(found) for found in partly] == [_set(found) for found in indexed]
    assert [_set(found) for found in uncovered] == [_set(found) for found in indexed]
    if language is None:
        assert [_set(found) for found in indexed] == [_set(found) for found in buffered]
        for with_index, without in zip(indexed, buffered, strict=True):
            if isinstance(without, dict):
                assert with_index == pytest.approx(without, rel=1e-4, abs=1e-4)


def _set(found: Any) -> Any:
    return set(found) if isinstance(found, dict) else found
