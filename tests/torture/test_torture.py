"""Short torture with fixed seeds, nightly long torture, and tests of the checker itself."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.crash.checks import PromiseBroken

from persisting.topic.routing import bucket_of
from torture import bucket, cluster, scenario, shared, soak, topic
from torture.follower_model import Content, FollowerModel
from torture.soak import Sample, growth
from torture.topic_model import TopicModel

# The tests cause warnings about torn tails and failed flushes.
pytestmark = pytest.mark.usefixtures("no_warnings")


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
async def test_topic_keeps_its_promises_under_a_fault(
    seed: int, fault: str, count: int, kind: str, retention: bool
) -> None:
    tally: Counter[str] = Counter()
    await topic.run_topic(seed, tally, count=count, fault=fault, kind=kind, retention=retention)
    assert tally[fault] == count


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(0, 400, 20))
async def test_twenty_topics_keep_their_promises_under_random_faults(seed: int) -> None:
    tally: Counter[str] = Counter()
    await topic.run_topics(seed, 1800, tally, most=20)
    assert tally["runs"] == 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1000, 1060, 12))
async def test_twelve_buckets_keep_acknowledged_records(seed: int) -> None:
    await bucket.run_buckets(seed, 1800, Counter(), most=12)


async def test_four_processes_that_share_a_topic_store_records_once() -> None:
    tally: Counter[str] = Counter()
    await shared.torture(1, 8, tally)
    assert tally["records"] > 100


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 6))
async def test_four_processes_share_a_topic_for_minutes(seed: int) -> None:
    tally: Counter[str] = Counter()
    await shared.torture(seed, 180, tally)
    assert tally["records"] > 1000


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
async def test_cluster_stores_records_once_and_consumes_them_at_least_once(seed: int) -> None:
    tally: Counter[str] = Counter()
    await cluster.torture(seed, 120, tally)
    assert tally["acknowledged"] > 500


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_ten_minutes_of_mixed_load_leak_no_resources(tmp_path: Path) -> None:
    await soak.soak(1, 600, Counter(), str(tmp_path / "soak.html"))


# The checker must detect every kind of violation


def put(
    model: TopicModel, number: int, *ids: str, acknowledged: bool = True, at: float = 0.0
) -> None:
    records = [{"id": name, "n": number} for name in ids]
    model.follow({"records": records, "put": number, "producer": 0, "at": at})
    model.follow({"begin": "put", "put": number, "producer": 0})
    if acknowledged:
        model.follow({"done": "put", "put": number, "producer": 0})


@pytest.fixture
def model() -> TopicModel:
    """The model of a topic with one bucket: two puts were acknowledged, one was not."""
    made = TopicModel(1)
    put(made, 1, "a")
    put(made, 2, "b", "c")
    put(made, 3, "d", "e", acknowledged=False)
    return made


def test_checker_reports_a_list_that_only_some_buckets_of_a_log_hold() -> None:
    names = [f"r{n}" for n in range(8)]
    parts: dict[int, list[str]] = {0: [], 1: []}
    for name in names:
        parts[bucket_of(name, 2)].append(name)
    assert all(parts.values())
    for held, is_whole in (([0, 1], True), ([], True), ([0], False), ([1], False)):
        model = TopicModel(2)
        put(model, 1, *names, acknowledged=False)
        found = {b: (0, parts[b] if b in held else []) for b in parts}
        if is_whole:
            model.reconcile(found, {})
        else:
            with pytest.raises(PromiseBroken, match="only, though all share a log"):
                model.reconcile(found, {})


@pytest.mark.parametrize("found", [["a", "b", "c"], ["a", "b", "c", "d", "e"]])
def test_checker_accepts_acknowledged_puts_with_or_without_the_failed_put(
    model: TopicModel, found: list[str]
) -> None:
    model.reconcile({0: (0, found)}, {})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (["a"], "lost"),
        (["b", "c", "a"], "reordered"),
        (["a", "b", "c", "a"], "stored twice"),
        (["a", "b"], "part of a put"),
        (["a", "b", "c", "d"], "part of a put"),
        (["a", "b", "c", "x"], "never put"),
    ],
)
def test_checker_reports_lost_repeated_reordered_and_torn_puts(
    model: TopicModel, found: list[str], message: str
) -> None:
    with pytest.raises(PromiseBroken, match=message):
        model.reconcile({0: (0, found)}, {})


def test_checker_reports_observed_rows_that_moved_or_vanished(model: TopicModel) -> None:
    model.reconcile({0: (0, ["a", "b", "c"])}, {})
    with pytest.raises(PromiseBroken, match="starts at 1"):
        model.reconcile({0: (1, ["b", "c"])}, {})
    with pytest.raises(PromiseBroken, match=r"missing \['b'\]"):
        model.reconcile({0: (0, ["a", "c"])}, {})


def test_checker_accepts_a_failed_put_only_at_the_end(model: TopicModel) -> None:
    model.reconcile({0: (0, ["a", "b", "c"])}, {})
    put(model, 4, "f")
    model.reconcile({0: (0, ["a", "b", "c", "f"])}, {})
    with pytest.raises(PromiseBroken, match="never put"):
        model.reconcile({0: (0, ["a", "b", "c", "f", "d", "e"])}, {})


def test_checker_reports_a_changed_row(model: TopicModel) -> None:
    with pytest.raises(PromiseBroken, match="came back as"):
        model.check_rows({0: [{"id": "a", "n": 7}]})


def test_checker_reports_a_commit_that_skips_or_is_lost(model: TopicModel) -> None:
    model.reconcile({0: (0, ["a", "b", "c"])}, {})
    model.follow({"got": ["a", "b"], "from": {}, "to": {"0": 2}})
    model.follow({"committed": {"0": 2}})
    model.check_group({0: 2})
    with pytest.raises(PromiseBroken, match="skips"):
        model.check_group({0: 3})
    with pytest.raises(PromiseBroken, match="was committed"):
        model.check_group({0: 1})


def test_checker_reports_a_tag_that_vanished_or_moved(model: TopicModel) -> None:
    model.reconcile({0: (0, ["a", "b", "c"])}, {})
    model.follow({"begin": "tag", "name": "t"})
    model.follow({"done": "tag", "name": "t", "result": {"0": (0, 3)}})
    model.reconcile({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 3)}})
    with pytest.raises(PromiseBroken, match="is missing"):
        model.reconcile({0: (0, ["a", "b", "c"])}, {})
    with pytest.raises(PromiseBroken, match="holds"):
        model.reconcile({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 2)}})


# Without a log


def begin_round(model: TopicModel, **options: Any) -> None:
    """Start a round without a log and with these options."""
    model.begin_round(scenario.Round("", 0, "kill", 1, 1, "persisting", options))


def flush(model: TopicModel, *, done: bool = True) -> None:
    model.follow({"begin": "flush"})
    if done:
        model.follow({"done": "flush", "result": None})


@pytest.fixture
def unlogged() -> TopicModel:
    """The model of a topic without a log: "a" was flushed, "b" and "c" were only acknowledged."""
    made = TopicModel(1)
    begin_round(made)
    put(made, 1, "a")
    flush(made)
    put(made, 2, "b", "c")
    put(made, 3, "d")
    flush(made, done=False)
    return made


@pytest.mark.parametrize("found", [["a"], ["a", "b", "c"], ["a", "b", "c", "d"]])
@pytest.mark.parametrize("seen", [False, True])
def test_checker_accepts_loss_of_the_unflushed_end_without_a_log(
    unlogged: TopicModel, found: list[str], seen: bool
) -> None:
    if seen:
        unlogged.reconcile({0: (0, ["a", "b", "c", "d"])}, {})
    unlogged.reconcile_after_exit({0: (0, found)}, {})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "lost"),
        (["a", "d"], "lost"),
        (["a", "b"], "part of a put"),
        (["b", "c"], "lost"),
        (["a", "d", "b", "c"], "reordered"),
        (["a", "b", "c", "d", "d"], "stored twice"),
    ],
)
def test_checker_reports_any_other_loss_without_a_log(
    unlogged: TopicModel, found: list[str], message: str
) -> None:
    with pytest.raises(PromiseBroken, match=message):
        unlogged.reconcile_after_exit({0: (0, found)}, {})


@pytest.mark.parametrize("found", [[], ["a", "c"], ["a", "b", "d"]])
def test_checker_reports_loss_of_observed_rows_except_at_the_end(
    unlogged: TopicModel, found: list[str]
) -> None:
    unlogged.reconcile({0: (0, ["a", "b", "c", "d"])}, {})
    with pytest.raises(PromiseBroken, match="missing"):
        unlogged.reconcile_after_exit({0: (0, found)}, {})


def test_checker_reports_loss_while_the_process_is_running(unlogged: TopicModel) -> None:
    with pytest.raises(PromiseBroken, match="lost"):
        unlogged.reconcile({0: (0, ["a", "b", "c"])}, {})


def test_checker_reports_rows_that_return_after_a_crash_lost_them(unlogged: TopicModel) -> None:
    unlogged.reconcile_after_exit({0: (0, ["a"])}, {})
    with pytest.raises(PromiseBroken, match="never put"):
        unlogged.reconcile({0: (0, ["a", "b", "c"])}, {})


# Automatic retention


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
def test_checker_accepts_retention_only_up_to_its_limits(
    limits: dict[str, Any], start: int, seen: bool
) -> None:
    model, ids = TopicModel(1), ["a", "b", "c"]
    begin_round(model, **limits)
    for number, name in enumerate(ids):
        put(model, number, name, at=number)
    model.follow({"begin": "observation", "at": 6.5})
    if seen:
        model.reconcile({0: (0, ids)}, {})
    with pytest.raises(PromiseBroken, match="starts at"):
        model.reconcile({0: (start + 1, ids[start + 1 :])}, {})
    with pytest.raises(PromiseBroken, match=r"lost|missing"):
        model.reconcile({0: (start - 1, ids[start:])}, {})
    model.reconcile({0: (start, ids[start:])}, {})


@pytest.mark.parametrize("held_by", ["groups", "tags"])
def test_checker_reports_retention_of_rows_it_must_wait_for(held_by: str) -> None:
    model = TopicModel(1)
    begin_round(model, retention_rows=1, retention_waits_for=[held_by])
    put(model, 1, "a", "b", "c")
    model.reconcile({0: (0, ["a", "b", "c"])}, {})
    model.follow({"begin": "tag", "name": "t"})
    model.follow({"done": "tag", "name": "t", "result": {"0": (0, 3)}})
    model.reconcile({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 3)}})
    model.follow({"got": ["a"], "from": {}, "to": {"0": 1}})
    model.reconcile({0: (0, ["a", "b", "c"])}, {"t": {0: (0, 3)}})
    with pytest.raises(PromiseBroken, match="starts at 1"):
        model.reconcile({0: (1, ["b", "c"])}, {"t": {0: (0, 3)}})
    model.follow({"commit": {"0": 1}})
    model.follow({"begin": "delete_tag", "name": "t"})
    model.follow({"done": "delete_tag", "name": "t", "result": True})
    model.reconcile({0: (1, ["b", "c"])}, {})


def test_checker_reports_gaps_that_a_consumer_was_not_told_of(model: TopicModel) -> None:
    model.reconcile({0: (0, ["a", "b", "c"])}, {})
    with pytest.raises(PromiseBroken, match="skipped without an error"):
        model.follow({"got": ["c"], "from": {"0": 1}, "to": {"0": 3}})
    with pytest.raises(PromiseBroken, match="a was read at offset 1"):
        model.follow({"got": ["a"], "from": {"0": 1}, "to": {"0": 2}})
    with pytest.raises(PromiseBroken, match="out of range"):
        model.follow({"out_of_range": {"0": 2}, "starts": {"0": 2}})
    model.follow({"out_of_range": {"0": 1}, "starts": {"0": 2}})


# Readers without the lock


def show(follower: FollowerModel, first: int, *ids: str, epoch: int = 0) -> None:
    """Show these records to the reader."""
    records = {name: {"id": name, "n": 1} for name in "abcdefx"}
    shown = [records[name] for name in ids]
    follower.follow({"seen": shown, "bucket": 0, "first": first, "epoch": epoch}, records)


def check_shown(
    follower: FollowerModel, start: int, *ids: str, epoch: int = 0, lossy: bool = False
) -> None:
    """Check the reader of a bucket that holds these records at last."""
    contents = {0: Content(epoch, (start, list(ids)))}
    assert follower.behind(contents, lossy=lossy) is None
    follower.check(contents, lossy=lossy)


@pytest.fixture
def follower() -> FollowerModel:
    """The model of a reader of one bucket, which was shown two pages."""
    made = FollowerModel(1)
    show(made, 0, "a", "b")
    show(made, 2, "c")
    return made


def test_checker_accepts_a_reader_that_was_shown_every_record_once(follower: FollowerModel) -> None:
    check_shown(follower, 0, "a", "b", "c")
    show(follower, 3, "d")
    check_shown(follower, 2, "c", "d")


def test_checker_reports_a_reader_that_was_shown_gaps_repetitions_or_changes(
    follower: FollowerModel,
) -> None:
    for first in (1, 2, 4):
        with pytest.raises(PromiseBroken, match=f"shown offset {first} instead of 3"):
            show(follower, first, "d")
    with pytest.raises(PromiseBroken, match="never put"):
        follower.follow({"seen": [{"id": "d"}], "bucket": 0, "first": 3, "epoch": 0}, {})
    with pytest.raises(PromiseBroken, match="instead of"):
        follower.follow(
            {"seen": [{"id": "d", "n": 2}], "bucket": 0, "first": 3, "epoch": 0},
            {"d": {"id": "d", "n": 1}},
        )
    with pytest.raises(PromiseBroken, match="without notice"):
        show(follower, 3, "d", epoch=1)
    show(follower, 3, "a")
    with pytest.raises(PromiseBroken, match="twice"):
        check_shown(follower, 0, "a", "b", "c", "a")


def test_checker_reports_shown_records_that_vanished_or_moved(follower: FollowerModel) -> None:
    with pytest.raises(PromiseBroken, match="shown b at offset 1, where c is stored"):
        check_shown(follower, 0, "a", "c", "b")
    with pytest.raises(PromiseBroken, match="shown c at offset 2, but the bucket ends at 2"):
        follower.check({0: Content(0, (0, ["a", "b"]))}, lossy=False)


def test_checker_reports_a_reader_that_was_not_shown_everything(follower: FollowerModel) -> None:
    for lossy in (False, True):
        behind = follower.behind({0: Content(0, (0, ["a", "b", "c", "d"]))}, lossy=lossy)
        assert behind is not None
        assert "ends at offset 4 of epoch 0, the reader is at offset 3" in behind


def test_checker_reports_a_reader_beyond_the_end_unless_records_may_be_lost(
    follower: FollowerModel,
) -> None:
    contents = {0: Content(0, (0, ["a", "b"]))}
    behind = follower.behind(contents, lossy=False)
    assert behind is not None
    assert "ends at offset 2 of epoch 0, the reader is at offset 3" in behind
    assert follower.behind(contents, lossy=True) is None


def test_checker_follows_a_reader_over_a_loss(follower: FollowerModel) -> None:
    check_shown(follower, 0, "a", "b", lossy=True)
    with pytest.raises(PromiseBroken, match="without notice"):
        show(follower, 3, "f", epoch=1)
    follower.follow({"restored": 0, "epoch": 1, "offset": 2}, {})
    show(follower, 2, "d", "e", epoch=1)
    check_shown(follower, 0, "a", "b", "d", "e", epoch=1)


def test_checker_accepts_loss_of_shown_records_only_if_it_is_lossy(follower: FollowerModel) -> None:
    check_shown(follower, 0, "a", "b", lossy=True)
    follower.restart()
    show(follower, 0, "a", "b", "d")
    check_shown(follower, 0, "a", "b", "d")


def test_checker_accepts_skipped_records_only_if_retention_dropped_them(
    follower: FollowerModel,
) -> None:
    follower.follow({"skipped": 0}, {})
    show(follower, 5, "f")
    with pytest.raises(PromiseBroken, match="began with offset 5, though the bucket starts at 4"):
        check_shown(follower, 4, "e", "f")
    check_shown(follower, 5, "f")


def test_checker_follows_a_reader_over_a_restore(follower: FollowerModel) -> None:
    follower.observe(0, 0, (0, ["a", "b", "c"]))
    follower.follow({"restored": 0, "epoch": 1, "offset": 2}, {})
    show(follower, 2, "d", epoch=1)
    with pytest.raises(PromiseBroken, match="epoch 1: a reader was shown a at offset 0, where x"):
        check_shown(follower, 0, "x", "b", "d", epoch=1)


def test_checker_compares_what_was_shown_before_a_restore(follower: FollowerModel) -> None:
    follower.observe(0, 0, (0, ["a", "b", "x"]))
    follower.follow({"restored": 0, "epoch": 1, "offset": 2}, {})
    with pytest.raises(PromiseBroken, match="epoch 0: a reader was shown c at offset 2, where x"):
        check_shown(follower, 0, "a", "b", epoch=1)


def test_seed_determines_the_work_and_the_faults() -> None:
    first, second = ([scenario.steps(r) for r in scenario.rounds_of(5, 4)] for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert scenario.rounds_of(5, 4) == scenario.rounds_of(5, 4)
    assert scenario.rounds_of(5, 4) != scenario.rounds_of(6, 4)
    assert scenario.rounds_of(5, 4, kind="lance", retention=True) == scenario.rounds_of(
        5, 4, kind="lance", retention=True
    )


def test_explicit_choices_override_the_seed() -> None:
    natures = {
        round_.description
        for seed in range(20)
        for round_ in scenario.rounds_of(seed, 4, "eio", "unlogged", retention=False)
    }
    assert natures == {"unlogged"}
    drawn = {round_.description for seed in range(40) for round_ in scenario.rounds_of(seed, 4)}
    stores = ("logged", "unlogged", "lance")
    assert drawn == {*stores, *(f"{store} with retention" for store in stores)}


def samples(**rising: float) -> list[Sample]:
    rng = random.Random(1)
    flat = {"memory": 200.0, "files": 40.0, "threads": 30.0, "disk": 20.0}
    return [
        Sample(n, *(flat[k] + rng.random() + rising.get(k, 0.0) * n for k in Sample._fields[1:]))
        for n in range(48)
    ]


@pytest.mark.parametrize("what", Sample._fields[1:])
def test_soak_reports_a_growing_resource(what: str) -> None:
    assert growth(samples()) == []
    (description,) = growth(samples(**{what: 3.0}))
    assert description.startswith(f"{what} grew")
