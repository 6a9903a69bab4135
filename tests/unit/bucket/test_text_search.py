"""Text search gives the same answers in the buffer, the log, the table and through an index."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.brute_force import QUIET
from support.buckets import Bucket
from support.children import python, wait_for_line

from persisting.queue import InvalidArgument, PersistingBackend, read_queue, write_queue
from persisting.table import indexes, text_search

PLACES = ("buffer", "table", "selected rows", "both", "index", "index and later rows")

TEXTS = [
    "打开登录页面，输入密码",  # 0
    "Open the login page and type the password",  # 1
    "打开Login页面",  # 2
    "Python bindings for the library",  # 3
    "library bindings, without the snake",  # 4
    "python pythons pythonic",  # 5
    "研究生命起源",  # 6
    "東京都に行きました",  # 7
    "ログインページを開く",  # 8
    "로그인을 했습니다",  # 9
    "Naïve café, the end",  # 10
    "bindings of Python",  # 11
    None,  # 12
]

SEARCHES: list[tuple[dict[str, Any], set[int]]] = [
    ({"text": "登录"}, {0}),
    ({"text": "密码"}, {0}),
    ({"text": "页面"}, {0, 2}),
    ({"text": "生命"}, {6}),
    ({"text": "东京"}, set()),
    ({"text": "東京"}, {7}),
    ({"text": "京都"}, {7}),
    ({"text": "ログイン"}, {8}),
    ({"text": "로그인"}, {9}),
    ({"text": "录输"}, set()),
    ({"text": "面"}, {0, 2}),
    ({"text": "login"}, {1, 2}),
    ({"text": "login 登录"}, {0, 1, 2}),
    ({"text": "login 页面", "match": "all"}, {2}),
    ({"text": "login页面", "match": "phrase"}, {2}),
    ({"text": "登录页面", "match": "phrase"}, {0}),
    ({"text": "页面登录", "match": "phrase"}, set()),
    ({"text": "python bindings for", "match": "any"}, {3, 4, 5, 11}),
    ({"text": "python bindings", "match": "all"}, {3, 11}),
    ({"text": "python bindings", "match": "phrase"}, {3}),
    ({"text": "the end", "match": "phrase"}, {10}),
    ({"text": "naive CAFÉ", "match": "phrase"}, {10}),
    ({"text": '+bindings -"python bindings"', "match": "query"}, {4, 11}),
    ({"text": "python*", "match": "query"}, {3, 5, 11}),
    ({"text": "+python* -pythonic", "match": "query"}, {3, 11}),
    ({"text": "pyhton~2", "match": "query"}, {3, 5, 11}),
    ({"text": "pyhton~", "match": "query"}, set()),
    ({"text": "passwort", "fuzziness": 1}, {1}),
    ({"text": "caf*", "match": "query"}, {10}),
    ({"text": "bindings -登录 -library", "match": "query"}, {11}),
    ({"text": "+页面 -登录", "match": "query"}, {2}),
    ({"text": '"python bind*"', "match": "query"}, {3}),
    ({"text": '"bindings of pyth*"', "match": "query"}, {11}),
    ({"text": "the", "where": "id < 4"}, {1, 3}),
    ({"text": "the", "where": "id = 3"}, {3}),
    ({"text": "登录", "where": "id > 0"}, set()),
    ({"text": "?!"}, set()),
]


async def fill(backend: Any, place: str, language: str | None = None) -> None:
    records = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    first = 7 if place in ("both", "index and later rows") else len(records)
    await backend.put_batch(records[:first])
    if place != "buffer":
        await backend.flush()
    if place.startswith("index"):
        await backend.create_index("text", language=language)
    for record in records[first:]:
        await backend.put(record)
        if place == "index and later rows" and record["id"] == 9:
            await backend.flush()


@pytest.mark.parametrize("place", PLACES)
async def test_records_are_found_wherever_they_are(
    persisting: Bucket, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = persisting.open(**QUIET)
    await fill(backend, place)
    if place == "selected rows":
        monkeypatch.setattr(text_search, "_READ_WHOLLY", 0)
    for search, expected in SEARCHES:
        hits = await backend.search(k=100, **search)
        assert {hit["id"] for hit in hits} == expected, (place, search)
        scores = [hit["_score"] for hit in hits]
        assert scores == sorted(scores, reverse=True)
        assert all(score > 0 for score in scores)


async def test_unflushed_records_of_a_killed_owner_are_found_in_its_log(tmp_path: Path) -> None:
    with python(_OWNER, str(tmp_path), json.dumps(TEXTS)) as child:
        assert wait_for_line(child) == "done"
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        for search, expected in SEARCHES:
            hits = await reader.search(k=100, **search)
            assert {hit["id"] for hit in hits} == expected, search


_OWNER = """
import asyncio, json, sys
from persisting.queue import write_queue
async def main():
    options = {"enable_wal": True, "flush_interval": None}
    writer = await write_queue(
        topic="t", storage_path=sys.argv[1], backend="persisting", backend_options=options
    )
    await writer.put([{"id": i, "text": text} for i, text in enumerate(json.loads(sys.argv[2]))])
    print("done", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_topic_finds_records_of_all_buckets(tmp_path: Path) -> None:
    store = await write_queue(
        topic="t", bucket_column="id", storage_path=str(tmp_path), backend="persisting"
    )
    await fill(store, "index and later rows")
    for search, expected in SEARCHES:
        hits = await store.search(k=100, **search)
        assert {hit["id"] for hit in hits} == expected, search
    with pytest.raises(InvalidArgument, match="match must be one of"):
        await store.search(text="a", match="each")
    await store.close()


@pytest.mark.parametrize("place", PLACES)
async def test_better_text_matches_come_first(
    persisting: Bucket, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "selected rows":
        monkeypatch.setattr(text_search, "_READ_WHOLLY", 0)
    backend = persisting.open(**QUIET)
    await fill(backend, place)

    async def best(**search: Any) -> int:
        return (await backend.search(**search))[0]["id"]

    assert await best(text="打开登录页面") == 0, "has all pairs of characters"
    assert await best(text="login 页面") == 2, "has both"
    assert await best(text="python bindings library") == 3, "has all words"
    assert await best(text="pythonic", fuzziness=2) == 5, "has the word as typed"


async def test_index_with_a_language_matches_words_by_their_stem(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await fill(backend, "index and later rows", "english")

    async def ids(text: str, **how: Any) -> set[int]:
        return {hit["id"] for hit in await backend.search(text=text, k=100, **how)}

    assert await ids("binding") == {3, 4, 11}
    assert await ids("typing") == {1}
    assert await ids("python binding", match="phrase") == {3}
    assert await ids("登录") == {0}
    assert await ids("binding 登录") == {0, 3, 4, 11}
    assert await ids("bindin*", match="query") == {3, 4, 11}, "beginnings are those of the words"
    assert await ids("bindngs", fuzziness=1) == {3, 4, 11}
    (index,) = await backend.indexes()
    assert (index["column"], index["language"]) == ("text", "english")
    await backend.create_index("text")
    assert await ids("binding") == set(), "another index without a language replaced it"
    assert len(await backend.indexes()) == 1


async def test_language_must_be_known_and_belongs_to_text(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await fill(backend, "buffer")
    with pytest.raises(InvalidArgument, match="language must be None or one of arabic, danish"):
        await backend.create_index("text", language="klingon")
    with pytest.raises(InvalidArgument, match="language='english' is for text indexes"):
        await backend.create_index("id", language="english")


async def test_match_option_needs_a_searched_text(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put({"id": 1, "v": [1.0, 2.0]})
    with pytest.raises(InvalidArgument, match="match and fuzziness are for a text search"):
        await backend.search(vector=[1.0, 2.0], match="all")


async def test_words_joined_with_korean_are_found_through_an_index(persisting: Bucket) -> None:
    """The tokenizer of the index keeps ``API를`` as one word."""
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"id": 0, "text": "API를 호출"}, {"id": 1, "text": "an API call"}])
    await backend.create_index("text")
    assert {hit["id"] for hit in await backend.search(text="api")} == {0, 1}
    assert {hit["id"] for hit in await backend.search(text="호출")} == {0}


async def test_next_owner_rebuilds_a_text_index_of_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = {
        "base_tokenizer": "simple",
        "lower_case": True,
        "ascii_folding": True,
        "stem": False,
        "remove_stop_words": False,
        "max_token_length": None,
    }
    with monkeypatch.context() as patch:
        patch.setattr(
            indexes.IndexSpec, "name", property(lambda s: f"persisting_text_text_l2_{s.column}")
        )
        patch.setattr(indexes.text_analysis, "index_settings", lambda language: old)
        async with PersistingBackend(bucket_id=0, storage_path=tmp_path, **QUIET) as backend:
            await fill(backend, "index")
    reader = PersistingBackend(bucket_id=0, storage_path=tmp_path, **QUIET, read_only=True)
    assert [hit["id"] for hit in await reader.search(text="登录")] == [0], "not from the old index"
    await reader.close()

    with caplog.at_level(logging.WARNING, "persisting"):
        async with PersistingBackend(bucket_id=0, storage_path=tmp_path, **QUIET) as backend:
            assert [hit["id"] for hit in await backend.search(text="登录")] == [0]
            await backend.compact()
            await _until_indexed(backend)
            hits = await backend.search(text="python bindings", match="phrase")
            assert [hit["id"] for hit in hits] == [3]
    assert "rebuilding the text index of field 'text'" in caplog.text


async def _until_indexed(backend: Any) -> None:
    for _ in range(200):
        (index,) = await backend.indexes()
        if not index["behind"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the index was not rebuilt: {index}")
