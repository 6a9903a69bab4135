"""Several machines that share nothing but an object store: hosts die, hang and lose their links.

Each host is a network namespace with a folder of its own. Needs root and iproute2.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_nodes import HERE, Node, Process
from support.network_hosts import Host, HostedFaultProxy, HostedSeaweedFS, Network
from support.object_stores import environment_of, fresh_prefix, url
from support.small_disk import SmallDisk
from support.store_client import BUCKETS, ONCE, WRITERS

PASSPHRASE = "several machines"
LEASE = 5.0
PORT = 7000
PROGRESS_SECONDS = 240.0


class Machines:
    """A store on one host, storage nodes on others, and a client on the last one."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.network = Network()
        self.store_host = self.network.add_host()
        self.store = HostedSeaweedFS(folder / "store", self.store_host)
        self.proxy: HostedFaultProxy | None = None
        self.hosts = [self.network.add_host() for _ in range(nodes)]
        self.folders = [folder / f"host-{number}" for number in range(nodes)]
        self.client_host = self.network.add_host()
        self.url = url(fresh_prefix())
        self.nodes: dict[int, Node] = {}
        self.client: Process | None = None
        self._ended: list[Process] = []

    def start(self) -> None:
        self.store.start()
        for number in range(len(self.hosts)):
            self.start_node(number)
        self.client = self._run(self.client_host, "write")
        self.progress()

    def use_proxy(self) -> HostedFaultProxy:
        """Reach the store through a proxy on its host; called before :meth:`start`."""
        self.proxy = HostedFaultProxy(self.store, self.store_host)
        return self.proxy

    def _store_options(self) -> dict[str, str]:
        return (self.proxy or self.store).options()

    def start_node(self, number: int) -> None:
        """Start the node of a host, which has its own folder and its own credentials."""
        host, folder = self.hosts[number], self.folders[number]
        folder.mkdir(exist_ok=True)
        seeds = [f"{self.hosts[other].address}:{PORT}" for other in self.nodes if other != number]
        self.nodes[number] = Node(
            *(["--seeds", *seeds] if seeds else []),
            *("--address", f"{host.address}:{PORT}", "--passphrase", PASSPHRASE),
            *("--storage", self.url),
            cwd=folder,
            prefix=host.prefix,
            variables=environment_of(self._store_options()),
        ).ready()

    def _run(self, host: Host, mode: str) -> Process:
        seeds = [f"{other.address}:{PORT}" for other in self.hosts]
        return Process(
            *(str(HERE / "store_client.py"), mode, "--address", f"{host.address}:0"),
            *("--seeds", *seeds, "--passphrase", PASSPHRASE),
            *("--url", self.url, "--lease", str(LEASE)),
            prefix=host.prefix,
            variables=environment_of(self._store_options()),
        )

    def kill_node(self, number: int) -> None:
        self.nodes[number].kill()
        self._ended.append(self.nodes.pop(number))

    # What the client has seen

    def acknowledged(self) -> Counter[str]:
        """Return how many puts of each writer were acknowledged."""
        assert self.client is not None
        return Counter(line.split()[0] for line in self.client.lines("ACK"))

    def progress(self, puts: int = 5) -> None:
        """Wait until every writer has had this many more puts acknowledged."""
        before = self.acknowledged()
        print(f"waiting for progress after {before.total()} puts, {len(self.errors())} errors")
        names = [ONCE, *map(str, range(WRITERS))]
        self.until(lambda: all(self.acknowledged()[n] >= before[n] + puts for n in names))

    def until(self, condition: Callable[[], bool]) -> None:
        assert self.client is not None
        deadline = time.monotonic() + PROGRESS_SECONDS
        while not condition():
            assert self.client.popen.poll() is None, self.client.output
            assert time.monotonic() < deadline, self.explain()
            time.sleep(0.2)

    def errors(self) -> list[str]:
        assert self.client is not None
        return self.client.lines("ERR")

    def explain(self) -> str:
        assert self.client is not None
        parts = [f"acknowledged: {self.acknowledged()}", *self.errors()[-20:]]
        for number, node in self.nodes.items():
            parts.append(f"node {number} ({node.id}):\n{node.output[-4000:]}")
        return "\n".join(parts)

    def check(self) -> None:
        """Stop the writers; every acknowledged record is there once and in order."""
        assert self.client is not None
        self.client.signal(signal.SIGTERM)
        self.client.wait_for("DONE", seconds=PROGRESS_SECONDS)
        acknowledged: dict[str, set[int]] = defaultdict(set)
        for line in self.client.lines("ACK"):
            name, number = line.split()
            acknowledged[name].add(int(number))
        failed = {int(line.split()[1]) for line in self.errors() if line.split()[0] == ONCE}
        reading = self._run(self.client_host, "read")
        try:
            reading.wait_for("DONE", seconds=PROGRESS_SECONDS)
            found = [json.loads(line.split(" ", 1)[1]) for line in reading.lines("BUCKET")]
        finally:
            reading.close()
        assert len(found) == BUCKETS
        counts: Counter[tuple[str, int]] = Counter()
        for records in found:
            last: dict[str, int] = {}
            for name, number in records:
                assert number > last.get(name, -1), f"writer {name}: {number} after {last[name]}"
                last[name] = number
                counts[name, number] += 1
        for name, numbers in acknowledged.items():
            records = [3 * number + k for number in sorted(numbers) for k in range(3)]
            assert [n for n in records if counts[name, n] != 1] == []
        extra = {(name, n // 3) for name, n in counts if n // 3 not in acknowledged[name]}
        assert extra <= {(ONCE, number) for number in failed}
        print(
            f"{sum(map(len, acknowledged.values()))} puts acknowledged, {len(self.errors())} errors"
        )

    def close(self) -> None:
        processes: list[Any] = [*self.nodes.values(), *self._ended]
        for process in [*processes, *([self.client] if self.client else [])]:
            process.close()
        if self.proxy is not None:
            self.proxy.close()
        self.store.kill()
        self.network.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk for the store of ``machines``, if a test asks for it first."""
    disk = SmallDisk(tmp_path / "store", megabytes=256)
    yield disk
    disk.close()


@pytest.fixture
def new_machines(tmp_path: Path) -> Iterator[Machines]:
    """Machines that run nothing yet."""
    made = Machines(tmp_path, nodes=3)
    yield made
    made.close()


@pytest.fixture
def machines(new_machines: Machines) -> Machines:
    new_machines.start()
    return new_machines


pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def test_nothing_is_lost_duplicated_or_reordered_when_hosts_die_and_hang(
    machines: Machines,
) -> None:
    for number in (0, 1):
        machines.kill_node(number)
        machines.progress()
        machines.start_node(number)
        machines.progress()
    machines.nodes[2].signal(signal.SIGSTOP)
    machines.progress()
    machines.nodes[2].signal(signal.SIGCONT)
    machines.progress()
    machines.check()


def test_nothing_is_lost_duplicated_or_reordered_when_links_are_cut(machines: Machines) -> None:
    for number in (0, 2):
        machines.hosts[number].cut()
        machines.progress()
        machines.hosts[number].mend()
        machines.progress()
    machines.check()


def test_writers_wait_for_a_store_that_cannot_be_reached_and_errors_name_it(
    machines: Machines,
) -> None:
    before = len(machines.errors())
    machines.store_host.cut()
    machines.until(lambda: any(machines.url in error for error in machines.errors()[before:]))
    machines.store_host.mend()
    machines.progress()
    messages = machines.errors()[before:]
    named = [machines.url in message for message in messages]
    assert any(named), messages
    # A client that stops waiting before the nodes do knows only that they have not answered.
    silent = ["did not answer" in message for message in messages]
    assert all(a or b for a, b in zip(named, silent, strict=True)), messages
    machines.store.kill()
    machines.store.start()
    machines.progress()
    machines.check()


def test_writers_continue_after_the_disk_of_the_store_was_full_and_an_error_named_it(
    small_disk: SmallDisk, machines: Machines
) -> None:
    """A client that stops waiting before the node does says only that no owner answers."""
    small_disk.fill()

    def is_named() -> bool:
        return any(
            machines.url in message and "500 Internal Server Error" in message
            for message in machines.errors()
        )

    machines.until(is_named)
    machines.store.kill()  # its own journal refuses writes until it is started again
    small_disk.make_room()
    machines.store.start()
    machines.progress()
    machines.check()


TIMEOUT_SECONDS = 10.0
"""How long a client waits for an answer."""

FAULTS: dict[str, dict[str, Any]] = {
    "409": {"answer": 409},
    "412": {"answer": 412},
    "429": {"answer": 429},
    "500": {"answer": 500},
    "503": {"answer": 503},
    "answer after the client has given up": {"hold": TIMEOUT_SECONDS + 2, "share": 0.02},
    "answer lost after the request was carried out": {"lose": True},
    "connection closed before the request was carried out": {"drop": True},
}


def test_nothing_is_lost_duplicated_or_reordered_when_the_store_answers_with_errors(
    new_machines: Machines,
) -> None:
    """Every fault meets some requests of every kind, from all hosts; then all faults together."""
    machines, proxy = new_machines, new_machines.use_proxy()
    machines.start()
    rounds = [[fault] for fault in FAULTS.values()] + [list(FAULTS.values())]
    for faults in rounds:
        share = 0.1 / len(faults)
        proxy.replace_faults(*({"match": "", "share": share, **fault} for fault in faults))
        machines.progress(puts=20)
        assert proxy.replace_faults() > 0
        machines.progress()
    for number in (0, 1):
        proxy.replace_faults(*({"match": "", "share": 0.02, **one} for one in FAULTS.values()))
        machines.kill_node(number)
        machines.progress()
        machines.start_node(number)
        machines.progress()
    proxy.replace_faults()
    machines.progress()
    machines.check()
