"""The programs in examples/ that use topics run as a user would run them."""

from __future__ import annotations

import re

import pytest
from support.example_runner import run_example


def test_embedded_queue_example_keeps_its_topic(tmp_path):
    first = run_example("embedded_queue.py", folder=tmp_path)
    assert "stored before: 0\n" in first
    assert first.count("got {'customer'") == 15
    for customer in ("ada", "bob", "cy"):
        numbers = re.findall(rf"'customer': '{customer}', 'number': (\d)", first)
        assert numbers == list("01234")
    second = run_example("embedded_queue.py", folder=tmp_path)
    assert "stored before: 15\n" in second
    assert "read again: 15 rows" in second
    assert (tmp_path / "queue_storage" / "orders" / "topic.json").is_file()


def test_pulsing_queue_example_stores_and_handles_each_record_once(tmp_path):
    first = run_example("pulsing_queue.py", folder=tmp_path)
    assert "stored:  1000\n" in first
    assert "handled: 1000 by" in first
    assert "lag:     0\n" in first
    second = run_example("pulsing_queue.py", folder=tmp_path)
    assert "stored:  1000\n" in second
    assert "handled: 0 by" in second


@pytest.mark.parametrize("runs", [1, 2])
def test_custom_backend_example_works_embedded_and_on_pulsing(tmp_path, runs):
    for _ in range(runs):
        output = run_example("custom_backend.py", folder=tmp_path)
        assert "embedded: 10 notes" in output
        assert "on Pulsing: [{'id': 10, 'text': 'one more'}]" in output
    assert list((tmp_path / "queue_storage" / "notes").glob("bucket_*/records.db"))


def test_trajectory_search_example_searches_vectors_words_and_a_tag(tmp_path):
    first = run_example("trajectory_search.py", folder=tmp_path)
    found = re.findall(r"^(.*):\n((?:   .*\n)+)", first, re.MULTILINE)
    like, word, rewarded, whole = (lines.splitlines() for _, lines in found)
    assert like[0].endswith("pay the cart")
    assert all("password" in line for line in word)
    assert len(word) == 2
    assert [line.split(": ")[1] for line in rewarded] == ["pay the cart"]
    assert len(whole) == 4
    assert "steps at tag 'policy-1': 7, now: 15\n" in first
    assert "mean reward: 0.50 then, 0.75 now\n" in first
    second = run_example("trajectory_search.py", folder=tmp_path)
    assert "steps at tag 'policy-1': 22, now: 30\n" in second


def test_training_snapshot_example_reads_the_same_rows_in_both_epochs(tmp_path):
    for _ in range(2):
        output = run_example("training_snapshot.py", folder=tmp_path)
        tagged = int(re.search(r"tagged (\d+) rows in 4 buckets", output)[1])
        epochs = re.findall(r"epoch \d: (\d+) rows, digest (\w+)", output)
        assert tagged >= 1000
        assert epochs == [(str(tagged), epochs[0][1])] * 2
        assert int(re.search(r"meanwhile (\d+) rows were dropped", output)[1]) > 0
        assert int(re.search(r"put in this run: (\d+)", output)[1]) > 2000
        assert "the same rows in both epochs: True\n" in output


def test_rollout_buffer_example_is_bounded_and_searchable(tmp_path):
    for number in (1, 2, 3):
        output = run_example("rollout_buffer.py", str(tmp_path / "buffer"))
        assert f"steps so far: {number * 600}\n" in output
        assert "minibatch: (32, 8)\nabove 2.0: True\nnearest to the first: True 3\n" in output
        kept = int(output.rsplit(" ", 1)[1])
        assert kept == 600 if number == 1 else 1000 <= kept < 1800


def test_agent_farm_example_solves_every_task_although_an_agent_is_killed(tmp_path):
    output = run_example("agent_farm.py", str(tmp_path / "farm"))
    assert output.splitlines() == [
        "tasks: 60",
        "an agent was killed",
        "solved: 58, given up: 2",
        "  task 17: ToolError: the site is down, after 8 attempts",
        "  task 41: ToolError: the site is down, after 8 attempts",
        "delivered again: 2",
        "solved: 60, given up: 0",
    ]
