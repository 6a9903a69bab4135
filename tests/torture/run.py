"""Torture by hand or by night.

    make torture TORTURE_ARGS="--seconds 600 --seed 7"

Every part draws its work and its faults from seeds, which are printed when something is broken:
the same seed gives the same work and the same faults, as far as the operating system allows.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from support.crash.checking import Broken

from torture import bucket, cluster, plan, soak, spark, topic

Part = Callable[[argparse.Namespace, float, "Counter[str]"], Awaitable[None]]


async def _topic(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    between = spark.writing() if given.spark else None
    await topic.lives(
        given.seed,
        seconds,
        tally,
        given.lives,
        given.fault,
        between,
        given.kind,
        given.retention,
    )


async def _bucket(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await bucket.lives(given.seed, seconds, tally, given.lives)


async def _cluster(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await cluster.torture(given.seed, seconds, tally)


async def _spark(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await asyncio.to_thread(spark.torture, given.seed, seconds, tally)


async def _soak(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await soak.soak(given.seed, seconds, tally, given.report)


PARTS: dict[str, Part] = {
    "bucket": _bucket,
    "topic": _topic,
    "cluster": _cluster,
    "soak": _soak,
    "spark": _spark,
}
USUAL = ("bucket", "topic", "cluster", "soak")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="for all parts together")
    parser.add_argument("--seed", type=int, default=None, help="by chance unless it is named")
    parser.add_argument("--only", choices=PARTS, help="one part; without it, all but Spark")
    parser.add_argument("--lives", type=int, default=None, help="at most so many seeds")
    parser.add_argument("--fault", choices=plan.FAULTS, help="topics suffer from this one only")
    parser.add_argument("--kind", choices=plan.KINDS, help="all topics are of this one")
    parser.add_argument(
        "--retention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="all topics have retention by itself, or none",
    )
    parser.add_argument("--spark", action="store_true", help="Spark writes to the topics, too")
    parser.add_argument("--report", default=None, help="where the soak leaves its page")
    given = parser.parse_args()
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(1_000_000)
    return given


async def torture(given: argparse.Namespace) -> bool:
    """Every chosen part for its share of the time; whether all held."""
    chosen = [given.only] if given.only else USUAL
    held = True
    for name in chosen:
        tally: Counter[str] = Counter()
        started = time.monotonic()
        try:
            await PARTS[name](given, given.seconds / len(chosen), tally)
        except Broken as exc:
            held = False
            print(f"BROKEN in {name}: {exc}", file=sys.stderr, flush=True)
        survived = ", ".join(f"{count} {what}" for what, count in sorted(tally.items()))
        took = time.monotonic() - started
        print(f"{name}: {survived or 'nothing'} in {took:.0f} s", flush=True)
    return held


def main() -> None:
    given = arguments()
    logging.getLogger("persisting").setLevel(logging.CRITICAL)
    print(f"seed {given.seed}", flush=True)
    sys.exit(not asyncio.run(torture(given)))


if __name__ == "__main__":
    main()
