"""Every screen over HTTP: what it shows, in both languages, and what its forms change."""

from __future__ import annotations

import asyncio
import html
import io
import json
import os
import re
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from support.console import (
    HOSTILE,
    HOSTILE_GROUP,
    HOSTILE_PATH,
    HOSTILE_TOPIC,
    SCREENS,
    Reply,
    RunningConsole,
    awaited,
    files_of,
    positions,
    queries_of,
    running_console,
    shown,
    stop_queries_of,
    text_with,
)
from support.waiting import until_true

from persisting.queue import read_queue, write_queue
from persisting.topic.topic_files import TopicFolder
from persisting.ui.queries import QueryPool, QueryTooLarge, RecordHit, SearchQuery
from persisting.ui.query_worker import reserved_bytes
from persisting.ui.runs import records_of_run, step_key

READING_SCREENS = [
    *SCREENS,
    "/topics/runs/records?tag=v1",
    "/topics/runs/trajectories",
    "/topics/runs/trajectories/run?field=agent&value=%22agent-a%22",
]


@pytest.mark.parametrize("path", READING_SCREENS)
def test_screen_is_shown_in_english_and_chinese(console: RunningConsole, path: str) -> None:
    english = console.ask("GET", path, headers={"Accept-Language": "de, en;q=0.8"})
    chinese = console.ask("GET", path, headers={"Accept-Language": "zh-CN,zh;q=0.9,en;q=0.8"})
    assert (english.status, chinese.status) == (200, 200)
    assert '<html lang="en">' in english.text
    assert '<html lang="zh-CN">' in chinese.text
    assert "Keyboard" in english.text
    assert "键盘" in chinese.text
    assert "Keyboard" not in chinese.text


def test_viewing_screens_changes_no_file(console: RunningConsole, template: Path) -> None:
    before = files_of(template)
    for path in READING_SCREENS:
        assert console.ask("GET", path).status == 200
    assert files_of(template) == before


def test_chosen_language_is_remembered(console: RunningConsole) -> None:
    reply = console.post("/language/zh", back="/topics/runs")
    assert (reply.status, reply.headers["location"]) == (303, "/topics/runs")
    cookie = reply.headers["set-cookie"].partition(";")[0]
    page = console.ask("GET", "/", headers={"Cookie": cookie, "Accept-Language": "en"})
    assert '<html lang="zh-CN">' in page.text
    elsewhere = console.post("/language/zh", back="//evil.example/")
    assert elsewhere.headers["location"] == "/"


def test_topics_show_records_buckets_and_lag(console: RunningConsole) -> None:
    text = text_with(console, "/", "trainers")
    assert "140" in text
    assert "trainers 90" in text
    assert "runs" not in shown(console.get("/", filter="hostile").text).split("Topics", 2)[2]


def test_filter_that_matches_no_topic_says_so(console: RunningConsole) -> None:
    text_with(console, "/", "trainers")
    reply = console.get("/", filter="<nothing>")
    assert reply.status == 200
    assert "No topic has <nothing> in its name." in shown(reply.text)


def test_topics_are_sorted_and_paged(template: Path, tmp_path: Path) -> None:
    storage = tmp_path / "many"
    for number in range(120):
        (storage / f"topic-{number:03d}").mkdir(parents=True)
        (storage / f"topic-{number:03d}" / "topic.json").write_text("{}")
    with running_console(storage) as console:
        first = console.get("/").text
        assert "topic-000" in first
        assert "topic-119" not in first
        assert "topic-119" in console.get("/", page=2).text
        assert "topic-119" in console.get("/", order="desc").text
        text = text_with(console, "/?sort=problem&order=desc", "damaged")
        assert "topic.json" in text


def test_topic_shows_buckets_fields_and_charts(console: RunningConsole) -> None:
    text_with(console, "/topics/runs", "Put rate")
    page = console.get("/topics/runs").text
    text = shown(page)
    for part in ("2 by id", "embedding", "fixed_size_list", "Lag of trainers", "Size on disk"):
        assert part in text
    assert page.count('<svg class="chart"') == 4


def test_records_are_paged_in_order_of_arrival(console: RunningConsole) -> None:
    backward: list[str] = []
    page = console.get("/topics/runs/records", limit=50)
    newest = positions(page.text)
    while True:
        backward = positions(page.text) + backward
        older = re.search(r'rel="prev" href="([^"]+)"', page.text)
        if older is None:
            break
        page = console.ask("GET", html.unescape(older[1]))
    assert len(backward) == len(set(backward)) == 140
    page = console.get("/topics/runs/records", limit=50, **{"from": "0:0,1:0"})
    forward = positions(page.text)
    while newer := re.search(r'rel="next" href="([^"]+)"', page.text):
        page = console.ask("GET", html.unescape(newer[1]))
        forward += positions(page.text)
    assert forward == backward
    assert backward[-50:] == newest


def test_records_jump_to_offset_time_tag_and_version(console: RunningConsole) -> None:
    page = console.get("/topics/runs/records", bucket=1, offset=7, limit=2)
    assert positions(page.text) == ["1:7", "1:8"]
    assert len(positions(console.get("/topics/runs/records", time="1h", limit=500).text)) == 140
    assert positions(console.get("/topics/runs/records", time="0s").text) == []
    assert len(positions(console.get("/topics/runs/records", tag="v1", limit=500).text)) == 120
    versions = console.get("/topics/runs/versions").text
    version = re.search(r"records\?bucket=0&amp;version=(\d+)", versions)
    assert version is not None
    page = console.get("/topics/runs/records", bucket=0, version=version[1])
    assert positions(page.text)
    state = f"bucket 0, version {version[1]}"
    assert state in shown(page.text)
    assert state in shown(console.get("/topics/runs/records/0/0", version=version[1]).text)
    assert "State at " in shown(console.get("/topics/runs/records/0/0", at="0s").text)
    past = console.get("/topics/runs/versions", page=10**6).text
    assert past.count("<li data-row") == versions.count("<li data-row") > 0


def test_page_and_download_have_only_the_chosen_columns(console: RunningConsole) -> None:
    page = console.get("/topics/runs/records", columns="score,task", limit=1).text
    head = shown(re.search(r"<thead>.*?</thead>", page, re.S)[0])  # type: ignore[index]
    assert head == "Position Time (UTC) score task"
    query = "&".join(f"columns={quote(name)}" for name in ("turn", "a,b"))
    page = console.ask("GET", f"/topics/chat/records?{query}&limit=5").text
    head = shown(re.search(r"<thead>.*?</thead>", page, re.S)[0])  # type: ignore[index]
    assert head == "Position Time (UTC) turn a,b"
    older = re.search(r'rel="prev" href="([^"]+)"', page)
    assert older is not None
    assert "Position Time (UTC) turn a,b" in shown(console.ask("GET", html.unescape(older[1])).text)
    link = re.search(r'href="([^"]+format=jsonl[^"]*)"', page)
    assert link is not None
    lines = console.ask("GET", html.unescape(link[1])).text.splitlines()
    assert [set(json.loads(line)["record"]) for line in lines] == [{"turn", "a,b"}] * 5


def test_record_is_a_tree_with_plot_steps_and_json(console: RunningConsole) -> None:
    page = console.get("/topics/runs/records/0/3").text
    assert '<svg class="vector"' in page
    assert "32 dimensions, norm" in page
    assert "tokens" in page
    record = json.loads(console.get("/topics/runs/records/0/3/json").text)
    assert record["id"].startswith("agent-")
    assert len(record["embedding"]) == 32
    missing = console.get("/topics/runs/records/0/999999")
    assert missing.status == 404
    assert "there is no offset 999999" in missing.text


def test_download_contains_what_is_shown(console: RunningConsole) -> None:
    lines = console.get("/topics/runs/download", bucket=0, offset=2, limit=3, format="jsonl")
    rows = [json.loads(line) for line in lines.text.splitlines()]
    assert [row["offset"] for row in rows] == [2, 3, 4]
    parquet = console.get("/topics/runs/download", bucket=0, offset=2, limit=3, format="parquet")
    table = pq.read_table(io.BytesIO(parquet.body))
    assert table.column("_offset").to_pylist() == [2, 3, 4]
    assert table.column("id").to_pylist() == [row["record"]["id"] for row in rows]


def test_hostile_records_are_escaped_on_every_screen(console: RunningConsole) -> None:
    base = HOSTILE_PATH
    for path in (
        "/",
        base,
        f"{base}/records",
        f"{base}/records/0/0",
        f"{base}/search?text=needle",
        f"{base}/search?where=id%20IS%20NOT%20NULL",
        f"{base}/search?text={quote(HOSTILE)}&text_field={quote(HOSTILE)}",
        f"{base}/trajectories?field=id",
        f"{base}/trajectories/run?field=id&value={quote(json.dumps(HOSTILE))}",
        f"{base}/versions",
        f"{base}/versions/compare?first=tagged",
        f"{base}/groups",
        "/topics/chat/trajectories/run?field=session&value=%22s%22",
        "/topics/chat/groups",
        f"{base}/maintenance",
        f"{base}/records?columns={quote('<img src=x onerror=hacked>')}",
        f"/topics/{quote('<b>nope</b>')}",
        f"/?filter={quote('<script>')}",
    ):
        reply = console.ask("GET", path)
        assert reply.status in (200, 400, 404), (path, reply.status)
        assert "<script>hacked" not in reply.text, path
        assert "<script>" not in reply.text.replace('<script src="/static/', ""), path
        assert "<img src=x" not in reply.text
        assert "<b>nope" not in reply.text
        assert 'href="javascript' not in reply.text
    assert HOSTILE_GROUP in html.unescape(console.get(f"{base}/groups").text)
    download = console.get(f"{base}/download")
    assert download.headers["content-disposition"] == (
        f"attachment; filename*=UTF-8''{quote(HOSTILE_TOPIC, safe='')}.jsonl"
    )


def test_images_in_records_are_shown_and_other_bytes_are_not(console: RunningConsole) -> None:
    base = f"{HOSTILE_PATH}/records/0/0"
    page = console.get(base).text
    image = re.search(r'<img src="([^"]+)"', page)
    assert image is not None
    reply = console.ask("GET", html.unescape(image[1]))
    assert reply.headers["content-type"] == "image/png"
    assert "sandbox" in reply.headers["content-security-policy"]
    assert reply.body.startswith(b"\x89PNG")
    for number in range(9):
        other = console.get(f"{base}/image", path=f".{number}")
        assert other.status == 400 or other.headers["content-type"] == "image/png"
    assert console.get(f"{base}/image", path=".0.0.0").status == 400


def test_search_by_words_vector_condition_and_all_together(console: RunningConsole) -> None:
    words = console.get("/topics/runs/search", text="lock")
    assert "<mark>lock</mark>" in words.text
    assert "score" in shown(words.text)
    like = console.get("/topics/runs/search", like="0:3", k=5)
    assert like.text.count("<li data-row") == 5
    assert "/topics/runs/records/0/3" in like.text
    where = console.get("/topics/runs/search", where="agent = 'agent-c' AND score >= 0")
    assert where.text.count("<li data-row") == 20
    both = console.get("/topics/runs/search", text="lock", like="0:3", where="score > 0.1", k=3)
    assert both.status == 200, shown(both.text)
    assert both.text.count("<li data-row") == 3


def test_trajectories_show_runs_and_their_steps(console: RunningConsole) -> None:
    page = shown(console.get("/topics/runs/trajectories", field="agent").text)
    for agent in ("agent-a 60", "agent-b 60", "agent-c 20"):
        assert agent in page
    run = console.get("/topics/runs/trajectories/run", field="agent", value='"agent-c"').text
    assert run.count("<li data-row") == 20
    assert "tokens" in run


def test_run_shows_the_steps_of_all_buckets_in_the_order_of_a_field(
    console: RunningConsole, template: Path
) -> None:
    def turns(**parameters: object) -> list[int]:
        page = console.get(
            "/topics/chat/trajectories/run", field="session", value='"s"', **parameters
        )
        assert page.status == 200, shown(page.text)
        return [int(n) for n in re.findall(r"<span>turn (\d+)</span>", page.text)]

    assert turns() == list(range(12))  # the field looks as if it numbers steps
    assert turns(order="a,b") != turns()
    assert sorted(turns(order="*")) == list(range(12))
    assert (
        console.get(
            "/topics/chat/trajectories/run", field="session", value='"s"', order="nope"
        ).status
        == 400
    )
    source = TopicFolder.open(template / "chat")
    first = records_of_run(source, "session", "s", 3, "turn")
    assert len(first) == 3
    assert len({hit.bucket for hit in records_of_run(source, "session", "s", 11)}) > 1
    values = ["b", 2, None, float("nan"), 1.5, "a", True]
    assert sorted(values, key=step_key)[:5] == [True, 1.5, 2, "a", "b"]


def test_topic_without_records_says_so(console: RunningConsole) -> None:
    assert "There are no records here." in shown(console.get("/topics/empty/records").text)
    assert "has no field yet" in shown(console.get("/topics/empty/trajectories").text)
    assert "There are no tags." in shown(console.get("/topics/empty/versions").text)


def test_compare_shows_records_and_fields_added(console: RunningConsole) -> None:
    text = shown(console.get("/topics/runs/versions/compare", first="v1").text)
    assert "Records added 20" in text
    assert "Fields added extra" in text
    assert "Some of the added records" in text


class TestGroupsAndTags:
    """Changes that leave the records alone share a console."""

    def test_group_is_moved_after_a_preview(self, changing: RunningConsole, storage: Path) -> None:
        path = "/topics/runs/groups/reset"
        preview = changing.get(path, group="trainers", to="earliest")
        assert "Records to read: 90 now, 140 afterwards." in shown(preview.text)
        assert "trainers 90" in text_with(changing, "/", "trainers")
        offsets = re.search(r'name="offsets" value="([^"]+)"', preview.text)
        assert offsets is not None
        assert changing.post(path, group="trainers", offsets=offsets[1]).status == 303
        text = shown(changing.get("/topics/runs/groups").text)
        assert "Lag 140" in text
        assert changing.post(path, group="nope", offsets="0:0").status == 400
        assert changing.post(path, group="trainers", offsets="0:99999").status == 400
        assert changing.get(path, group="trainers", to="time", where="soon").status == 400
        for where, left in (
            ({"to": "latest"}, 0),
            ({"to": "offset", "where": "1000000"}, 0),  # after the end
            ({"to": "offset", "where": "10"}, 120),
            ({"to": "time", "where": "1h"}, 140),
            ({"to": "time", "where": "0s"}, 0),
        ):
            reply = changing.get(path, group="trainers", **where)
            assert f"140 now, {left} afterwards." in shown(reply.text), where
        chinese = changing.ask(
            "GET", f"{path}?group=trainers&to=latest", headers={"Accept-Language": "zh"}
        )
        assert "latest" not in shown(chinese.text)

    def test_group_with_a_living_member_is_not_moved(
        self, changing: RunningConsole, storage: Path
    ) -> None:
        async def attempt() -> int:
            reader = await read_queue(topic="runs", storage_path=str(storage), group="trainers")
            async with reader:
                await reader.get(limit=1)
                reply = await asyncio.to_thread(
                    changing.post, "/topics/runs/groups/reset", group="trainers", offsets="0:0,1:0"
                )
                assert "close its readers first" in reply.text
                return reply.status

        assert awaited(attempt()) == 409

    def test_tags_are_made_and_deleted(self, changing: RunningConsole) -> None:
        path = "/topics/runs/versions/tags"
        assert changing.post(path, name="mine").status == 303
        assert "mine" in changing.get("/topics/runs/versions").text
        assert changing.post(path, name="../escape").status == 400
        assert changing.post(f"{path}/delete", name="mine").status == 303
        assert "mine" not in changing.get("/topics/runs/versions").text
        assert changing.post(f"{path}/delete", name="mine").status == 400


class TestTopicThatIsBeingWritten:
    """The owner of the topic carries changes out."""

    def test_topic_that_is_being_written_is_changed_through_its_owner(
        self, changing: RunningConsole, storage: Path
    ) -> None:
        async def attempt() -> list[Reply]:
            writer = await write_queue(topic="runs", storage_path=str(storage))
            async with writer:
                await writer.put({"id": "x"})
                path = "/topics/runs/versions"
                return [
                    await asyncio.to_thread(changing.post, f"{path}/tags", name="mine"),
                    await asyncio.to_thread(changing.get, path),
                    await asyncio.to_thread(changing.get, "/topics/runs/records"),
                ]

        tagged, versions, records = awaited(attempt())
        assert tagged.status == 303, shown(tagged.text)
        assert "mine" in versions.text
        assert records.status == 200

    def test_topic_of_an_owner_that_does_not_share_it_names_the_owner(
        self, changing: RunningConsole, storage: Path
    ) -> None:
        async def attempt() -> Reply:
            writer = await write_queue(topic="runs", storage_path=str(storage), local_socket=False)
            async with writer:
                await writer.put({"id": "x"})
                return await asyncio.to_thread(
                    changing.post, "/topics/runs/versions/tags", name="mine"
                )

        reply = awaited(attempt())
        assert reply.status == 409
        assert str(os.getpid()) in reply.text


def test_restore_needs_the_typed_name_and_an_unchanged_topic(
    changing: RunningConsole, storage: Path
) -> None:
    path = "/topics/runs/versions/restore"
    preview = changing.get(path, tag="v1")
    assert "20 records would be removed." in shown(preview.text)
    assert changing.post(path, tag="v1", confirm="run", removed=20).status == 400
    stale = changing.post(path, tag="v1", confirm="runs", removed=19)
    assert stale.status == 400
    assert "has changed since the preview" in stale.text
    done = changing.post(path, tag="v1", confirm="runs", removed=20)
    assert done.status == 200
    assert "20 records were removed." in shown(done.text)

    async def count() -> int:
        reader = await read_queue(topic="runs", storage_path=str(storage))
        async with reader:
            return await reader.count()

    assert awaited(count()) == 120
    assert len(positions(changing.get("/topics/runs/records", limit=500).text)) == 120


def test_maintenance_runs_and_shows_its_result(changing: RunningConsole, storage: Path) -> None:
    base = "/topics/runs/maintenance"
    assert changing.post(f"{base}/verify").status == 303
    text = text_with(changing, base, "no damage found")
    assert "140 records, " in text
    assert changing.post(f"{base}/compact").status == 303
    text_with(changing, base, "Fragments: ")
    assert changing.post(f"{base}/backup").status == 303
    text = text_with(changing, base, "files,")
    copies = list((storage.parent / "backups").iterdir())
    assert len(copies) == 1
    assert copies[0].name in text
    preview = changing.get(f"{base}/retain", rows=10)
    assert "Drop up to" in preview.text
    assert changing.post(f"{base}/retain", rows=10).status == 303
    text_with(changing, base, "records dropped")
    assert changing.post(f"{base}/nonsense").status == 400


def test_stopped_verify_is_reported_as_stopped(template: Path) -> None:
    with running_console(template) as console:
        base = "/topics/runs/maintenance"
        console.get("/topics/runs/search", text="lock")  # now its process runs and is idle
        stopped = stop_queries_of(console.process.pid)  # a check that does not end
        assert console.post(f"{base}/verify").status == 303
        assert "is already running" in console.post(f"{base}/verify").text
        assert console.post("/topics/chat/tasks/1/stop").status == 400
        assert console.post("/topics/runs/tasks/1/stop").status == 303
        text_with(console, base, "verify stopped")
        until_true(lambda: set(stopped) - set(queries_of(console.process.pid)))


def test_verify_in_the_console_reports_damage(changing: RunningConsole, storage: Path) -> None:
    file = next((storage / "runs" / "bucket_0" / "data.lance" / "data").iterdir())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    assert changing.post("/topics/runs/maintenance/verify").status == 303
    text = text_with(changing, "/topics/runs/maintenance", "DAMAGE FOUND")
    assert file.name in text


def test_large_records_cut_the_page_and_the_download(tmp_path: Path) -> None:
    async def fill() -> None:
        writer = await write_queue(
            "large", storage_path=str(tmp_path), backend="lance", num_buckets=1
        )
        async with writer:  # a table stores such texts in a few bytes
            await writer.put([{"id": n, "text": "x" * (1 << 20)} for n in range(40)])

    awaited(fill())
    assert sum(size for size, _ in files_of(tmp_path).values()) < 8 << 20
    with running_console(tmp_path) as console:
        page = console.get("/topics/large/records", limit=40)
        newest = positions(page.text)
        assert newest[-1] == "0:39"
        assert 10 < len(newest) < 25
        assert "the page was cut at 16" in page.text
        older = re.search(r'rel="prev" href="([^"]+)"', page.text)
        assert older is not None
        before = positions(console.ask("GET", html.unescape(older[1])).text)
        assert before[-1] == f"0:{39 - len(newest)}"
        lines = console.get(
            "/topics/large/download", limit=40, format="jsonl", **{"from": "0:0"}
        ).text.splitlines()
        assert 25 < len(lines) < 40
        assert json.loads(lines[-2])["offset"] == len(lines) - 2
        assert json.loads(lines[-1])["from"] == f"0:{len(lines) - 1}"
        parquet = console.get("/topics/large/download", limit=40, format="parquet")
        assert b"persisting.cut" in pq.read_schema(io.BytesIO(parquet.body)).metadata

    async def search() -> str:
        # Without what the libraries reserve, so that a small topic suffices.
        queries = QueryPool(60.0, (26 << 20) - reserved_bytes())
        query = SearchQuery(str(tmp_path), "large", 40, text="x", text_field="text")
        try:
            with pytest.raises(QueryTooLarge) as raised:
                await queries.run(query, list[RecordHit])
            narrow = SearchQuery(str(tmp_path), "large", 1, where="id = 7")
            assert [hit.offset for hit in await queries.run(narrow, list[RecordHit])] == [7]
        finally:
            await queries.close()
        return str(raised.value)

    assert "start the console with a larger --query-memory" in awaited(search())


def test_dead_letters_are_shown_and_delivered_again(tmp_path: Path) -> None:
    storage = tmp_path / "queues"

    async def fail_some(first: int) -> None:
        place = str(storage)
        writer = await write_queue("tasks", storage_path=place, durable=True, num_buckets=1)
        async with writer:
            rows = range(first, first + 5)
            await writer.put([{"id": n, "text": f"task {n} {HOSTILE}"} for n in rows])
        member = await read_queue("tasks", storage_path=place, group="solvers", mode="work")
        async with member:
            for delivery in await member.fetch(5):
                if delivery.record["id"] - first < 3:
                    await delivery.reject(f"no way {HOSTILE}")
                else:
                    await delivery.ack()

    async def deliver() -> list[int]:
        member = await read_queue("tasks", storage_path=str(storage), group="solvers", mode="work")
        async with member:
            return [delivery.record["id"] for delivery in await member.fetch(5)]

    awaited(fail_some(0))
    before = files_of(storage)
    with running_console(storage, "--allow-changes") as console:
        groups = text_with(console, "/topics/tasks/groups", "Dead letters 3")
        assert "Topic of the dead letters" in groups
        assert console.get("/topics/tasks.dead/records").status == 200
        path = "/topics/tasks/groups/redrive"
        preview = console.get(path, group="solvers")
        assert "Deliver 3 dead letters to solvers again?" in shown(preview.text)
        assert "<script>hacked" not in preview.text
        chosen = console.get(path, group="solvers", where="id = 1")
        assert "Deliver 1 dead letter to solvers again?" in shown(chosen.text)
        assert console.get(path, group="nobody").status == 400
        assert console.get(path, group="solvers", where="nope = 1").status == 400
        fields = dict(re.findall(r'name="(group|identity|numbers)" value="([^"]+)"', chosen.text))
        assert files_of(storage) == before  # the previews have written nothing
        again = {**fields, "identity": "0" * 32}
        assert "was created again since the preview" in console.post(path, **again).text
        assert console.post(path, **{**fields, "numbers": "1-999999999"}).status == 400
        awaited(fail_some(5))  # matches now, but was not previewed
        done = console.post(path, **fields)
        assert (done.status, done.headers["location"]) == (303, "/topics/tasks/groups?redriven=1")
        page = console.get("/topics/tasks/groups", redriven=1)
        assert "1 dead letter is delivered again." in shown(page.text)
        left = console.get(path, group="solvers")
        assert "Deliver 5 dead letters to solvers again?" in shown(left.text)
    assert awaited(deliver()) == [1]
