"""Datasets and streams in forked and spawned processes, without torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support import children
from support.waiting import until

from persisting.data import TopicDataset, TopicStream

FORK = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
from persisting.data import TopicDataset, TopicStream

path, kind, forks = sys.argv[1:]
dataset = TopicDataset(path, "v1")
stream = TopicStream(path, "v1", shuffle=1, batch_size=64)
half_read = iter(stream)
next(half_read)
expected = sorted(row["id"] for row in dataset.__getitems__(range(len(dataset))))

stop = False
def keep_reading():
    while not stop:
        dataset.__getitems__(range(0, 1000, 7))
        time.sleep(0.01)  # leaves the child a processor

if kind == "busy":
    threads = [threading.Thread(target=keep_reading, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)

def in_child():
    found = sorted(row["id"] for row in dataset.__getitems__(range(len(dataset))))
    assert found == expected, len(found)
    rest = [n for batch in stream for n in batch.column("id").to_pylist()]
    assert len(rest) == len(expected) - 64, len(rest)
    live = TopicStream(path, follow=True, batch_size=100, idle_timeout=0)
    assert sum(batch.num_rows for batch in live) == len(expected)
    try:
        next(half_read)
    except Exception as exc:
        assert "forked" in str(exc) or "another iteration" in str(exc), exc
    else:
        raise AssertionError("the parent's iterator was used")

for _ in range(int(forks)):
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        try:
            in_child()
        except BaseException as exc:
            print(repr(exc), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"a forked child ended with status {status}"
stop = True
print("parent", sum(batch.num_rows for batch in half_read) + 64)
"""


@pytest.mark.parametrize(
    ("kind", "forks"), [("busy", 1), pytest.param("idle", 4, marks=pytest.mark.nightly)]
)
@pytest.mark.timeout(700)
def test_forked_child_reads_everything_while_its_parent(topic: Path, kind: str, forks: int) -> None:
    assert children.run(FORK, topic, kind, forks).split() == ["parent", "1000"]


def _ids(stream: TopicStream, results: Any) -> None:
    results.put([n for batch in stream for n in batch.column("id").to_pylist()])


def _rows(dataset: TopicDataset, results: Any) -> None:
    results.put([row["id"] for row in dataset.__getitems__(range(len(dataset)))])


def test_spawned_process_reads_a_dataset_and_the_rest_of_a_stream(topic: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    dataset = TopicDataset(topic, "v1", where="id < 100")
    stream = TopicStream(topic, "v1", shuffle=1, batch_size=300)
    first = next(iter(stream)).column("id").to_pylist()
    found = []
    for target, argument in ((_rows, dataset), (_ids, stream)):
        process = context.Process(target=target, args=(argument, results))
        process.start()
        found.append(results.get(timeout=100))
        process.join()
    assert sorted(found[0]) == list(range(100))
    assert sorted(first + found[1]) == list(range(1000))


KILLED = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
from persisting.data import TopicDataset
dataset = TopicDataset(sys.argv[1], "v1")
if os.fork() == 0:
    dataset[0]
    helper = dataset._rows.get()._helper._process.pid
    print(os.getpid(), helper, flush=True)
    time.sleep(600)
os.wait()
"""


async def test_helper_ends_when_the_forked_process_is_killed(topic: Path) -> None:
    with children.python(KILLED, topic) as parent:
        child, helper = map(int, children.wait_for_line(parent).split())
        os.kill(child, signal.SIGKILL)

        async def has_ended() -> bool:
            try:
                stat = Path(f"/proc/{helper}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                return True
            return stat.rpartition(")")[2].split()[0] == "Z"

        await until(has_ended)


def test_error_of_the_helper_is_raised_as_the_same_error(topic: Path) -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import lance
from persisting.errors import InvalidArgument
from persisting.data import TopicDataset
from persisting.data import isolation
assert not isolation.lance_is_unsafe()
if os.fork() == 0:
    assert isolation.lance_is_unsafe()
    try:
        TopicDataset(sys.argv[1], "v1", columns=["nope"])
    except InvalidArgument as exc:
        print(exc, flush=True)
    os._exit(0)
os.wait()
"""
    assert "columns names 'nope'; the fields are: 'id'" in children.run(code, topic)


def test_import_of_the_package_loads_neither_torch_nor_the_readers() -> None:
    code = """
import sys
import persisting
assert "persisting.data" not in sys.modules
import persisting.data
assert not {"lance", "torch", "datasets", "pyarrow"} & set(sys.modules), sorted(sys.modules)
from persisting.data import TopicStream
assert not {"torch", "datasets"} & set(sys.modules)
"""
    children.run(code)
