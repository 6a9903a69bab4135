"""The small form of ``make torture``: fixed seeds, seconds; and its long form by night."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.crash.checking import Broken

from torture import bucket, cluster, plan, soak, topic
from torture.model import Ledger
from torture.soak import Sample, growth


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Torn tails and failed flushes are the daily bread here."""
    caplog.set_level(logging.CRITICAL, "persisting")


@pytest.mark.parametrize(
    ("seed", "fault", "count", "kind", "retention"),
    [
        (1, "kill", 2, "logged", False),
        (1, "power", 1, "logged", False),
        (12, "eio", 1, "logged", False),
        (12, "enospc", 1, "logged", False),
        (20, "kill", 2, "unlogged", False),
        (20, "power", 1, "lance", False),
        (21, "kill", 2, "changing", True),
        (21, "power", 1, "unlogged", True),
        (12, "eio", 1, "lance", True),
    ],
)
async def test_a_topic_keeps_what_it_promised_under_a_fault(
    seed: int, fault: str, count: int, kind: str, retention: bool
) -> None:
    tally: Counter[str] = Counter()
    await topic.live(seed, tally, count=count, fault=fault, kind=kind, retention=retention)
    assert tally[fault] == count


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(0, 400, 20))
async def test_twenty_topics_keep_what_they_promised_under_every_fault(seed: int) -> None:
    tally: Counter[str] = Counter()
    await topic.lives(seed, 1800, tally, most=20)
    assert tally["lives"] == 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1000, 1040, 8))
async def test_eight_buckets_keep_what_they_acknowledged(seed: int) -> None:
    await bucket.lives(seed, 1800, Counter(), most=8)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
async def test_a_cluster_stores_once_and_consumes_at_least_once(seed: int) -> None:
    tally: Counter[str] = Counter()
    await cluster.torture(seed, 120, tally)
    assert tally["acknowledged"] > 500


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_ten_minutes_of_mixed_load_grow_nothing(tmp_path: Path) -> None:
    await soak.soak(1, 600, Counter(), str(tmp_path / "soak.html"))


# The checker itself must be able to fail.


def put(ledger: Ledger, number: int, *ids: str, acknowledged: bool = True, at: float = 0.0) -> None:
    records = [{"id": name, "n": number} for name in ids]
    ledger.follow({"records": records, "put": number, "producer": 0, "at": at})
    ledger.follow({"begin": "put", "put": number, "producer": 0})
    if acknowledged:
        ledger.follow({"done": "put", "put": number, "producer": 0})


@pytest.fixture
def ledger() -> Ledger:
    """Of a topic of one bucket: two puts were acknowledged, one was not."""
    made = Ledger(1)
    put(made, 1, "a")
    put(made, 2, "b", "c")
    put(made, 3, "d", "e", acknowledged=False)
    return made


@pytest.mark.parametrize("found", [["a", "b", "c"], ["a", "b", "c", "d", "e"]])
def test_what_was_acknowledged_is_enough(ledger: Ledger, found: list[str]) -> None:
    ledger.settle({0: (0, found)}, {})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["a"], "lost"),
        (["b", "c", "a"], "another order"),
        (["a", "b", "c", "a"], "doubled"),
        (["a", "b"], "torn"),
        (["a", "b", "c", "d"], "torn"),
        (["a", "b", "c", "x"], "never put"),
    ],
)
def test_what_is_missing_doubled_reordered_or_torn_is_told(
    ledger: Ledger, found: list[str], said: str
) -> None:
    with pytest.raises(Broken, match=said):
        ledger.settle({0: (0, found)}, {})


def test_what_was_seen_must_stay_where_it_was(ledger: Ledger) -> None:
    ledger.settle({0: (0, ["a", "b", "c"])}, {})
    with pytest.raises(Broken, match="begins at 1"):
        ledger.settle({0: (1, ["b", "c"])}, {})
    with pytest.raises(Broken, match=r"missing \['b'\]"):
        ledger.settle({0: (0, ["a", "c"])}, {})


def test_a_refused_put_may_come_back_only_where_nothing_follows(ledger: Ledger) -> None:
    ledger.settle({0: (0, ["a", "b", "c"])}, {})
    put(ledger, 4, "f")
    ledger.settle({0: (0, ["a", "b", "c", "f"])}, {})
    with pytest.raises(Broken, match="never put"):
        ledger.settle({0: (0, ["a", "b", "c", "f", "d", "e"])}, {})


def test_a_changed_row_is_told(ledger: Ledger) -> None:
    with pytest.raises(Broken, match="came back as"):
        ledger.check_rows({0: [{"id": "a", "n": 7}]})


def test_a_commit_that_skips_or_is_lost_is_told(ledger: Ledger) -> None:
    ledger.settle({0: (0, ["a", "b", "c"])}, {})
    ledger.follow({"got": ["a", "b"], "from": {}, "to": {"0": 2}})
    ledger.follow({"committed": {"0": 2}})
    ledger.check_group({0: 2})
    with pytest.raises(Broken, match="skips"):
        ledger.check_group({0: 3})
    with pytest.raises(Broken, match="was committed"):
        ledger.check_group({0: 1})


def test_a_tag_that_went_or_moved_is_told(ledger: Ledger) -> None:
    ledger.settle({0: (0, ["a", "b", "c"])}, {})
    ledger.follow({"begin": "tag", "name": "t"})
    ledger.follow({"done": "tag", "name": "t", "result": {"0": (0, 3)}})
    ledger.settle({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 3)}})
    with pytest.raises(Broken, match="not there"):
        ledger.settle({0: (0, ["a", "b", "c"])}, {})
    with pytest.raises(Broken, match="holds"):
        ledger.settle({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 2)}})


# Without a log


def begin_round(ledger: Ledger, **options: Any) -> None:
    """Without a log, and with these options."""
    ledger.begin_round(plan.Round("", 0, "kill", 1, 1, "persisting", options))


def flush(ledger: Ledger, *, done: bool = True) -> None:
    ledger.follow({"begin": "flush"})
    if done:
        ledger.follow({"done": "flush", "result": None})


@pytest.fixture
def unlogged() -> Ledger:
    """The same without a log: "a" was flushed, "b" and "c" were only acknowledged."""
    made = Ledger(1)
    begin_round(made)
    put(made, 1, "a")
    flush(made)
    put(made, 2, "b", "c")
    put(made, 3, "d")
    flush(made, done=False)
    return made


@pytest.mark.parametrize("found", [["a"], ["a", "b", "c"], ["a", "b", "c", "d"]])
@pytest.mark.parametrize("seen", [False, True])
def test_without_a_log_a_crash_may_take_the_end_that_was_not_flushed(
    unlogged: Ledger, found: list[str], seen: bool
) -> None:
    if seen:
        unlogged.settle({0: (0, ["a", "b", "c", "d"])}, {})
    unlogged.settle_left({0: (0, found)}, {})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "lost"),
        (["a", "d"], "lost"),
        (["a", "b"], "torn"),
        (["b", "c"], "lost"),
        (["a", "d", "b", "c"], "another order"),
        (["a", "b", "c", "d", "d"], "doubled"),
    ],
)
def test_without_a_log_a_crash_takes_nothing_else(
    unlogged: Ledger, found: list[str], said: str
) -> None:
    with pytest.raises(Broken, match=said):
        unlogged.settle_left({0: (0, found)}, {})


@pytest.mark.parametrize("found", [[], ["a", "c"], ["a", "b", "d"]])
def test_without_a_log_what_was_seen_goes_from_the_end_only(
    unlogged: Ledger, found: list[str]
) -> None:
    unlogged.settle({0: (0, ["a", "b", "c", "d"])}, {})
    with pytest.raises(Broken, match="missing"):
        unlogged.settle_left({0: (0, found)}, {})


def test_without_a_log_nothing_goes_while_the_process_lives(unlogged: Ledger) -> None:
    with pytest.raises(Broken, match="lost"):
        unlogged.settle({0: (0, ["a", "b", "c"])}, {})


def test_what_a_crash_took_stays_away(unlogged: Ledger) -> None:
    unlogged.settle_left({0: (0, ["a"])}, {})
    with pytest.raises(Broken, match="never put"):
        unlogged.settle({0: (0, ["a", "b", "c"])}, {})


# With retention by itself


@pytest.mark.parametrize(
    ("limits", "start"),
    [
        ({"retention_rows": 2}, 1),
        ({"retention_bytes": 1}, 2),
        ({"retention_seconds": 5.0}, 2),
        ({"retention_rows": 1, "retention_seconds": 50.0}, 2),
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_retention_goes_as_far_as_its_limits(
    limits: dict[str, Any], start: int, seen: bool
) -> None:
    ledger, ids = Ledger(1), ["a", "b", "c"]
    begin_round(ledger, **limits)
    for number, name in enumerate(ids):
        put(ledger, number, name, at=number)
    ledger.follow({"begin": "look", "at": 6.5})
    if seen:
        ledger.settle({0: (0, ids)}, {})
    with pytest.raises(Broken, match="begins at"):
        ledger.settle({0: (start + 1, ids[start + 1 :])}, {})
    with pytest.raises(Broken, match=r"lost|missing"):
        ledger.settle({0: (start - 1, ids[start:])}, {})
    ledger.settle({0: (start, ids[start:])}, {})


@pytest.mark.parametrize("held_by", ["groups", "tags"])
def test_retention_leaves_what_it_waits_for(held_by: str) -> None:
    ledger = Ledger(1)
    begin_round(ledger, retention_rows=1, retention_waits_for=[held_by])
    put(ledger, 1, "a", "b", "c")
    ledger.settle({0: (0, ["a", "b", "c"])}, {})
    ledger.follow({"begin": "tag", "name": "t"})
    ledger.follow({"done": "tag", "name": "t", "result": {"0": (0, 3)}})
    ledger.settle({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 3)}})
    ledger.follow({"got": ["a"], "from": {}, "to": {"0": 1}})
    with pytest.raises(Broken, match="begins at 1"):
        ledger.settle({0: (1, ["b", "c"])}, {"t": {0: (0, 3)}})
    ledger.follow({"commit": {"0": 1}})
    ledger.follow({"begin": "delete_tag", "name": "t"})
    ledger.follow({"done": "delete_tag", "name": "t", "result": True})
    ledger.settle({0: (1, ["b", "c"])}, {})


def test_a_consumer_that_is_not_told_of_a_gap_is_told_here(ledger: Ledger) -> None:
    ledger.settle({0: (0, ["a", "b", "c"])}, {})
    with pytest.raises(Broken, match="passed over in silence"):
        ledger.follow({"got": ["c"], "from": {"0": 1}, "to": {"0": 3}})
    with pytest.raises(Broken, match="a came as offset 1"):
        ledger.follow({"got": ["a"], "from": {"0": 1}, "to": {"0": 2}})
    with pytest.raises(Broken, match="out of range"):
        ledger.follow({"told": {"0": 2}, "starts": {"0": 2}})
    ledger.follow({"told": {"0": 1}, "starts": {"0": 2}})


def test_a_seed_stands_for_the_same_work_and_the_same_faults() -> None:
    first, second = ([plan.steps(r) for r in plan.life(5, 4)] for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert plan.life(5, 4) == plan.life(5, 4)
    assert plan.life(5, 4) != plan.life(6, 4)
    assert plan.life(5, 4, kind="lance", retention=True) == plan.life(
        5, 4, kind="lance", retention=True
    )


def test_what_is_named_is_not_left_to_the_seed() -> None:
    natures = {
        round_.nature
        for seed in range(20)
        for round_ in plan.life(seed, 4, "eio", "unlogged", retention=False)
    }
    assert natures == {"unlogged"}
    drawn = {round_.nature for seed in range(40) for round_ in plan.life(seed, 4)}
    stores = ("logged", "unlogged", "lance")
    assert drawn == {*stores, *(f"{store} with retention" for store in stores)}


def samples(**rising: float) -> list[Sample]:
    dice = random.Random(1)
    flat = {"memory": 200.0, "files": 40.0, "threads": 30.0, "disk": 20.0}
    return [
        Sample(n, *(flat[k] + dice.random() + rising.get(k, 0.0) * n for k in Sample._fields[1:]))
        for n in range(48)
    ]


@pytest.mark.parametrize("what", Sample._fields[1:])
def test_what_grows_in_a_soak_is_told(what: str) -> None:
    assert growth(samples()) == []
    (told,) = growth(samples(**{what: 3.0}))
    assert told.startswith(f"{what} grew")
