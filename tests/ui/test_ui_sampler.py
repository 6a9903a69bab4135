"""What the console remembers of topics, and the process that samples them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from support.console import awaited, running_console, samplers_of
from support.waiting import until_true

from persisting.queue import write_queue
from persisting.ui.sampler import Sampler
from persisting.ui.series import KEPT_SECONDS, Series
from persisting.ui.storage_view import StorageView
from persisting.ui.topic_rounds import RoundEnd, RoundStart, TopicRounds, TopicUpdate


def new_sampler(view: StorageView) -> Sampler:
    return Sampler(view, 60.0, lambda topic, all_owners: {})


def put(storage: Path, topic: str, count: int) -> None:
    async def write() -> None:
        writer = await write_queue(topic, storage_path=str(storage), durable=True, num_buckets=1)
        async with writer:
            await writer.put([{"id": n} for n in range(count)])

    awaited(write())


def test_topic_is_read_again_only_after_its_files_have_changed(tmp_path: Path) -> None:
    put(tmp_path, "a", 2)
    put(tmp_path, "b", 3)
    view = StorageView(tmp_path)
    rounds, sampler = TopicRounds(view), new_sampler(view)

    def sample_all() -> list[str]:
        messages = list(rounds.sample_all(lambda seconds: None))
        assert messages[0] == RoundStart(sampler.names() or messages[0].names)
        assert messages[-1] == RoundEnd()
        for message in messages:
            sampler.take(message)
        return [seen.topic for seen in messages if isinstance(seen, TopicUpdate)]

    assert sample_all() == ["a", "b"]
    times = {name: sample.time for name, sample in sampler.samples().items()}
    assert sample_all() == []
    assert all(sample.time > times[name] for name, sample in sampler.samples().items())
    put(tmp_path, "b", 4)
    assert sample_all() == ["b"]
    assert {name: sample.rows for name, sample in sampler.samples().items()} == {"a": 2, "b": 7}
    assert len(sampler.samples()["b"].history.records) == 3


def test_topic_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)
    view = StorageView(tmp_path)
    rounds, sampler = TopicRounds(view), new_sampler(view)
    for names in (["a"], []):
        for message in rounds.sample_all():
            sampler.take(message)
        assert sampler.names() == names
        assert list(sampler.samples()) == names
        shutil.rmtree(tmp_path / "a", ignore_errors=True)


def test_round_that_began_before_a_change_does_not_hide_it(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)
    view = StorageView(tmp_path)
    sampler = new_sampler(view)
    early = list(TopicRounds(view).sample_all())
    put(tmp_path, "a", 2)
    seen = sampler.refresh("a")
    assert seen.rows == 3
    assert [point.value for point in seen.history.records.points()] == [3]
    for message in early:
        sampler.take(message)
    assert sampler.samples()["a"].rows == 3


def test_samples_are_kept_while_their_folder_cannot_be_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = tmp_path / "queues"
    put(storage, "a", 1)
    view = StorageView(storage)
    rounds, sampler = TopicRounds(view), new_sampler(view)
    for _ in range(3):
        for message in rounds.sample_all():
            sampler.take(message)
        shutil.rmtree(storage, ignore_errors=True)
    assert list(sampler.samples()) == ["a"]
    assert caplog.text.count("cannot list") == 1


def test_name_that_no_page_can_show_is_not_listed(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)
    shutil.copytree(os.fsencode(tmp_path / "a"), os.fsencode(tmp_path) + b"/\xff")
    assert StorageView(tmp_path).names() == ["a"]


def test_process_that_samples_topics_is_started_again_and_ends_with_the_console(
    template: Path,
) -> None:
    with running_console(template) as console:
        until_true(lambda: samplers_of(console.process.pid))
        (first,) = samplers_of(console.process.pid)
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
        until_true(lambda: os.getpriority(os.PRIO_PROCESS, first) == nice)
        os.kill(first, signal.SIGKILL)
        until_true(lambda: [pid for pid in samplers_of(console.process.pid) if pid != first])
        (second,) = samplers_of(console.process.pid)
        until_true(lambda: "not read yet" not in console.get("/").text)
        console.process.kill()
        until_true(lambda: not Path(f"/proc/{second}").exists())


def test_series_keeps_an_hour_and_one_point_before_it() -> None:
    series = Series()
    for second in range(0, 10_000, 10):
        series.add(second, second)
    times = [point.time for point in series.points()]
    assert times[0] < 9_990 - KEPT_SECONDS <= times[1]
    assert [point.time for point in series.points(9_965)] == [9_960, 9_970, 9_980, 9_990]
    assert [point.time for point in series.points(9_970)] == [9_960, 9_970, 9_980, 9_990]
    assert [point.time for point in series.points(20_000)] == [9_990]
    assert {point.value for point in series.rates(9_900)} == {1.0}


def test_series_is_read_while_another_thread_adds_to_it() -> None:
    series, done = Series(), threading.Event()

    def read() -> None:
        while not done.is_set():
            assert all(point.time == point.value for point in series.points())
        read_to_the_end.set()

    read_to_the_end = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20_000):
        series.add(number, number)
    done.set()
    reader.join()
    assert read_to_the_end.is_set()
