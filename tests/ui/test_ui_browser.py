"""The console in a real Chromium: what only a browser shows."""

from __future__ import annotations

import http.client
import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.children import python, wait_for_line
from support.console import (
    HOSTILE,
    HOSTILE_PATH,
    SCREENS,
    RunningConsole,
    queries_of,
    running_console,
    stop_queries_of,
)
from support.waiting import until_true

READING_SCREENS = [
    *SCREENS,
    "/topics/runs/trajectories?field=agent",
    "/topics/runs/trajectories/run?field=agent&value=%22agent-c%22",
    "/topics/nope",
    f"{HOSTILE_PATH}/records/0/0",
    "/topics/chat/trajectories/run?field=session&value=%22s%22",
    "/topics/empty",
    "/topics/empty/records",
    "/topics/empty/trajectories",
    "/topics/empty/versions",
    "/sign-in",
]
CHANGING_SCREENS = [
    "/topics/chat/groups",
    "/topics/chat/groups/redrive?group=solvers",
    "/topics/runs/records?columns=id&columns=score",
    "/topics/runs/groups",
    "/topics/runs/groups/reset?group=trainers&to=earliest",
    "/topics/runs/versions",
    "/topics/runs/versions/restore?tag=v1",
    "/topics/runs/maintenance",
    "/topics/runs/maintenance/retain?rows=10",
]
WRITER = """
import asyncio, sys
from persisting.queue import write_queue

async def main():
    writer = await write_queue(topic="live", storage_path=sys.argv[1], durable=True, num_buckets=2)
    first = int(sys.argv[2])
    for number in range(first, first + 100_000):
        html = "<img src=x onerror=alert(1)>"
        await writer.put({"id": f"live-{number}", "n": number, "html": html})
        if number == first:
            print("open", flush=True)
        await asyncio.sleep(0.01)

asyncio.run(main())
"""
AXE_RUN = """async () => {
  const result = await axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] });
  return result.violations
    .filter((found) => ["serious", "critical"].includes(found.impact))
    .map((found) => `${found.id}: ${found.nodes.map((node) => node.html).join(" ; ")}`);
}"""


def axe_source() -> str:
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


def looks() -> list[Any]:
    """Languages, widths and themes: one of the eight combinations in `make test`, all of
    them in the nightly run."""
    chosen = "zh-CN", 360, "dark"
    return [
        pytest.param(*look, marks=[] if look == chosen else pytest.mark.nightly)
        for look in itertools.product(("en-GB", "zh-CN"), (360, 1600), ("light", "dark"))
    ]


@pytest.mark.parametrize(("locale", "width", "scheme"), looks())
def test_every_screen_fits_and_axe_finds_nothing_serious(
    console: RunningConsole, new_page: Callable[..., Any], locale: str, width: int, scheme: str
) -> None:
    page, source = new_page(width, locale, scheme), axe_source()
    language = "zh-CN" if locale == "zh-CN" else "en"
    found, wide = {}, []
    for path in READING_SCREENS:
        page.goto(console.url + path)
        assert page.evaluate("document.documentElement.lang") == language
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(path)
        page.evaluate(source)
        if violations := page.evaluate(AXE_RUN):
            found[path] = violations
    assert found == {}
    assert wide == []


@pytest.mark.parametrize("locale", ["en-GB", pytest.param("zh-CN", marks=pytest.mark.nightly)])
def test_screens_that_change_topics_fit_and_axe_finds_nothing_serious(
    unchanged: RunningConsole, new_page: Callable[..., Any], locale: str
) -> None:
    width, scheme = (1600, "light") if locale == "en-GB" else (360, "dark")
    page, source = new_page(width, locale, scheme), axe_source()
    for path in CHANGING_SCREENS:
        page.goto(unchanged.url + path)
        page.evaluate(source)
        assert page.evaluate(AXE_RUN) == [], path
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_hostile_records_run_no_script(
    console: RunningConsole, new_page: Callable[..., Any]
) -> None:
    page = new_page()
    base = HOSTILE_PATH
    for part in (
        "",
        "/records",
        "/records/0/0",
        "/search?text=needle",
        "/versions",
        "/tail",
        "/groups",
        "/trajectories?field=id",
    ):
        page.goto(console.url + base + part)
        assert page.evaluate("window.hacked") is None
    page.goto(f"{console.url}{base}/records/0/0")
    expect(page.locator("img").first).to_have_js_property("naturalWidth", 1)
    assert HOSTILE in page.locator("article.record").inner_text()


def test_keyboard_moves_through_rows_and_opens_them(
    console: RunningConsole, new_page: Callable[..., Any]
) -> None:
    page = new_page()
    page.goto(f"{console.url}/topics/runs/records")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.locator("[data-row].selected").count() == 1
    place = page.locator("[data-row].selected a").inner_text()
    page.locator("main .scroll").first.focus()  # as after a click into the table
    page.keyboard.press("Enter")
    page.wait_for_url("**/records/*/*")
    assert place in page.locator("h1").inner_text()
    page.goto(f"{console.url}/topics/runs/search")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "text"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.keyboard.press("?")
    assert page.locator("dialog#help").is_visible()
    page.goto(f"{console.url}/topics/runs/groups")  # a screen without a search field
    page.keyboard.press("/")
    page.wait_for_url("**/topics/runs/search")


def test_refreshed_table_stays_where_it_was_scrolled(
    console: RunningConsole, new_page: Callable[..., Any]
) -> None:
    page = new_page(360)
    page.goto(console.url)
    moved = "document.querySelector('#topics .scroll').scrollLeft"
    page.evaluate(f"document.getElementById('topics').dataset.old = 1, {moved} = 40")
    page.wait_for_selector("#topics:not([data-old])")
    assert page.evaluate(moved) == 40


def test_search_replaces_the_results_and_the_address(
    console: RunningConsole, new_page: Callable[..., Any]
) -> None:
    page = new_page()
    page.goto(f"{console.url}/topics/runs/search")
    page.fill("[name=text]", "lock")
    page.press("[name=text]", "Enter")
    page.wait_for_selector("mark")
    page.wait_for_url(lambda url: url.endswith("/search?text=lock&k=20"))
    page.locator(".hits a").first.click()
    page.wait_for_url("**/records/*/*")


def test_cancelled_search_is_stopped_on_the_server(
    template: Path, new_page: Callable[..., Any]
) -> None:
    with running_console(template) as console:
        console.get("/topics/runs/search", text="lock")  # now its process runs and is idle
        stopped = stop_queries_of(console.process.pid)  # a search that does not end
        page = new_page()
        page.goto(f"{console.url}/topics/runs/search")
        page.fill("[name=text]", "lock")
        page.press("[name=text]", "Enter")
        page.click("main button:text('Cancel')")
        page.wait_for_selector("text=Cancelled.")
        until_true(lambda: set(stopped) - set(queries_of(console.process.pid)))
        for left in queries_of(console.process.pid):
            os.kill(left, signal.SIGCONT)
        page.press("[name=text]", "Enter")
        page.wait_for_selector("mark")


def test_live_tail_follows_puts_filters_and_survives_the_kill_of_the_owner(
    new_page: Callable[..., Any], tmp_path: Path
) -> None:
    storage = tmp_path / "queues"
    with python(WRITER, storage, 0) as first:
        wait_for_line(first)
        with running_console(storage) as console:
            page = new_page()
            page.goto(f"{console.url}/topics/live/tail?rate=500")
            page.wait_for_selector("#tail li")
            until_true(lambda: page.locator("#tail li").count() > 20)
            assert page.locator("#tail img").count() == 0
            page.click("#pause")
            assert "Paused" in page.inner_text("#tail-state")
            rows = page.locator("#tail li")
            newest, shown = rows.first.inner_text(), rows.count()
            page.wait_for_timeout(500)
            assert (rows.first.inner_text(), rows.count()) == (newest, shown)
            page.click("#pause")
            until_true(lambda: rows.first.inner_text() != newest)
            other = new_page()
            other.goto(f"{console.url}/topics/live/tail?rate=1")
            until_true(lambda: "left out by the rate limit" in other.inner_text("#tail-state"))
            other.goto(f"{console.url}/topics/live/tail?filter=nothing-has-this")
            until_true(lambda: "without the text" in other.inner_text("#tail-state"))
            assert other.locator("#tail li").count() == 0
            first.kill()
            first.wait()
            with python(WRITER, storage, 1_000_000) as second:
                wait_for_line(second)
                until_true(lambda: re.search(r"live-1\d{6}", rows.first.inner_text()))
            offsets = page.locator("#tail li a").all_inner_texts()
            assert len(offsets) == len(set(offsets))


def test_group_is_moved_and_topic_restored_after_preview_and_confirmation(
    changing: RunningConsole, new_page: Callable[..., Any]
) -> None:
    page = new_page()
    page.goto(f"{changing.url}/topics/runs/groups")
    page.click("main button:text('Preview')")
    page.wait_for_url("**/reset?*")
    assert "140 afterwards" in page.inner_text("main")
    page.click("button.danger")
    page.wait_for_selector("p.done")
    page.goto(f"{changing.url}/topics/runs/versions")
    page.click("main a:text('Restore…')")
    page.wait_for_url("**/restore?*")
    assert "20 records would be removed" in page.inner_text("main")
    page.fill("[name=confirm]", "runs")
    page.click("button.danger")
    page.wait_for_selector("p.done")
    assert "20 records were removed" in page.inner_text("main")


@pytest.mark.nightly
def test_stopped_server_leaves_the_page_usable(
    template: Path, new_page: Callable[..., Any]
) -> None:
    with running_console(template) as console:
        page = new_page()
        page.goto(console.url)
        search = new_page()
        search.goto(f"{console.url}/topics/runs/search")
        console.process.terminate()
        assert console.process.wait(90) == 0
        page.wait_for_timeout(6_000)
        assert "runs" in page.inner_text("main")
        search.fill("[name=text]", "lock")
        search.press("[name=text]", "Enter")
        search.wait_for_selector("text=The console does not answer; try again.")


@pytest.mark.nightly
def test_live_tail_that_was_refused_tries_again(
    console: RunningConsole, new_page: Callable[..., Any]
) -> None:
    others = []
    try:
        while True:
            other = http.client.HTTPConnection("127.0.0.1", console.port, timeout=60)
            other.request("GET", "/topics/runs/tail/events")
            reply = other.getresponse()
            if reply.status != 200:
                break
            assert reply.readline() == b"event: start\n"
            others.append(other)
        page = new_page()
        page.goto(f"{console.url}/topics/runs/tail")
        until_true(lambda: "trying again" in page.inner_text("#tail-state"))
    finally:
        for other in others:
            other.close()
    until_true(lambda: page.inner_text("#tail-state") == "Following")


def test_search_that_takes_too_long_is_stopped(template: Path) -> None:
    with running_console(template, "--query-timeout", "0.001") as console:
        reply = console.get("/topics/runs/search", text="lock")
        assert reply.status == 503
        assert "was stopped" in reply.text
        assert console.get("/topics/runs/records").status == 200
