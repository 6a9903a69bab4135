"""The small form of ``make torture``: fixed seeds, seconds; and its long form by night."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path

import pytest
from crash.checking import Broken

from torture import bucket, cluster, injector, plan, soak, topic
from torture.model import Ledger
from torture.soak import Sample, growth


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Torn tails and failed flushes are the daily bread here."""
    caplog.set_level(logging.CRITICAL, "persisting")


needs_a_compiler = pytest.mark.skipif(not injector.available(), reason="needs a C compiler")


@needs_a_compiler
@pytest.mark.parametrize(
    ("seed", "fault", "count"), [(1, "kill", 2), (1, "power", 1), (12, "eio", 1), (12, "enospc", 1)]
)
async def test_a_topic_keeps_what_it_acknowledged_under_a_fault(
    seed: int, fault: str, count: int
) -> None:
    tally: Counter[str] = Counter()
    await topic.live(seed, tally, count=count, fault=fault)
    assert tally[fault] == count


@needs_a_compiler
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(0, 400, 20))
async def test_twenty_topics_keep_what_they_acknowledged_under_every_fault(seed: int) -> None:
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


def put(ledger: Ledger, number: int, *ids: str, acknowledged: bool = True) -> None:
    records = [{"id": name, "n": number} for name in ids]
    ledger.follow({"records": records, "put": number, "producer": 0})
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
    ledger.follow({"got": ["a", "b"]})
    ledger.follow({"committed": {"0": 2}})
    ledger.check_group({0: 2})
    with pytest.raises(Broken, match="skips"):
        ledger.check_group({0: 3})
    with pytest.raises(Broken, match="was committed"):
        ledger.check_group({0: 1})


def test_a_tag_that_went_or_moved_is_told(ledger: Ledger) -> None:
    ledger.settle({0: (0, ["a", "b", "c"])}, {})
    ledger.follow({"begin": "tag", "name": "t"})
    ledger.follow({"done": "tag", "name": "t", "result": None})
    ledger.settle({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 3)}})
    with pytest.raises(Broken, match="not there"):
        ledger.settle({0: (0, ["a", "b", "c"])}, {})
    with pytest.raises(Broken, match="holds"):
        ledger.settle({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 2)}})


def test_a_seed_stands_for_the_same_work_and_the_same_faults() -> None:
    first, second = ([plan.steps(r) for r in plan.life(5, 4)] for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert plan.life(5, 4) == plan.life(5, 4)
    assert plan.life(5, 4) != plan.life(6, 4)


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
