"""``serve``: storage nodes as real processes, stopped, killed and misconfigured."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pulsing as pul
import pytest
from support.cli_runner import COMMAND, Answer, environment, line_of, piped
from support.doc_pages import ROOT

from persisting.cli.app import cli
from persisting.queue import read_queue, write_queue


class Node:
    """A storage node in another process."""

    def __init__(self, child: subprocess.Popen[bytes], storage: Path) -> None:
        self.child = child
        words = line_of(child.stdout).split()
        assert words[:1] + words[2:3] + words[4:5] == ["serving", "node", "storage"], words
        self.address, self.id = words[1], words[3]
        assert words[5] == str(storage)
        self.metrics = words[7] if len(words) > 6 else None

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.child.send_signal(number)
        out, err = self.child.communicate(timeout=60)
        return self.child.returncode, out.decode(), err.decode()


@contextmanager
def node(storage: Path, *words: object, **env: str) -> Iterator[Node]:
    child = subprocess.Popen(
        [*COMMAND, "serve", "-s", str(storage), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**env),
    )
    try:
        yield Node(child, storage)
    finally:
        child.kill()
        child.communicate()


@contextmanager
def two_nodes(storage: Path, *words: object) -> Iterator[tuple[Node, Node]]:
    with node(storage, *words) as one, node(storage, "--seed", one.address, *words) as two:
        yield one, two


async def client(*nodes: Node, hosts: int | None = None, **options: Any) -> Any:
    """Return a system that sees the nodes."""
    from persisting.cluster.pulsing_transport import PulsingTransport

    system = await pul.actor_system("127.0.0.1:0", seeds=[n.address for n in nodes], **options)
    for _ in range(600):
        if len(await PulsingTransport(system).hosts()) >= (len(nodes) if hosts is None else hosts):
            return system
        await asyncio.sleep(0.05)
    raise AssertionError("the client does not see the nodes")


async def stored(storage: Path) -> list[int]:
    async with await read_queue("t", storage_path=str(storage)) as reader:
        return sorted([record["n"] async for record in reader.get_stream()])


def numbered(numbers: range) -> list[dict[str, Any]]:
    return [{"id": f"k{n}", "n": n} for n in numbers]


async def test_sigterm_flushes_everything_and_exits_with_0(tmp_path: Path) -> None:
    with two_nodes(tmp_path / "q") as nodes:
        system = await client(*nodes)
        # So many buckets that each of the nodes, whose ids are random, gets some.
        writer = await write_queue(
            system, "t", storage_path=str(tmp_path / "q"), backend="persisting", num_buckets=24
        )
        await writer.put(numbered(range(300)))  # no log: only a flush makes it durable
        owners = {f"node {n.id[:8]}" for n in nodes}
        listed = (await asyncio.to_thread(piped, "topics", "-s", tmp_path / "q")).out
        assert all(name in listed for name in owners), "both nodes own buckets"
        for one in nodes:
            code, out, err = await asyncio.to_thread(one.stop)
            assert (code, err) == (0, "")
            assert out.endswith(f"closed node {one.id}: its buckets are flushed and free\n")
        await system.shutdown()
    assert await stored(tmp_path / "q") == list(range(300))


async def test_killed_node_loses_nothing_and_the_other_takes_over(tmp_path: Path) -> None:
    with two_nodes(tmp_path / "q") as (one, two):
        system = await client(one, two)
        writer = await write_queue(system, "t", storage_path=str(tmp_path / "q"), durable=True)
        await writer.put(numbered(range(200)))
        two.child.kill()
        await writer.put(numbered(range(200, 300)))
        await writer.close()
        assert (await asyncio.to_thread(one.stop))[0] == 0
        await system.shutdown()
    assert await stored(tmp_path / "q") == list(range(300))


def test_ctrl_c_stops_cleanly_with_130(tmp_path: Path) -> None:
    with node(tmp_path) as one:
        code, out, err = one.stop(signal.SIGINT)
    assert (code, err.strip()) == (130, "stopped")
    assert "its buckets are flushed and free" in out


def test_health_line_and_metrics_are_served(tmp_path: Path) -> None:
    words = ("--health-interval", "0.1", "--metrics-port", 0)
    with node(tmp_path, *words) as one:
        expected = "healthy: 1 storage node in the cluster, 0 buckets of 0 topics here"
        assert line_of(one.child.stdout) == expected
        assert one.metrics is not None
        with urlopen(one.metrics, timeout=30) as answer:
            assert "python_info" in answer.read().decode()
        assert one.stop()[0] == 0


def test_systemd_is_notified(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        with node(tmp_path / "q", "--health-interval", "0.1", **env) as one:
            seen = set()
            while not {"READY", "WATCHDOG", "STATUS"} <= seen:
                seen.add(manager.recv(1000).decode().partition("=")[0])
            assert one.stop()[0] == 0
            while "STOPPING" not in seen:
                seen.add(manager.recv(1000).decode().partition("=")[0])


async def test_topics_in_other_folders_are_refused(tmp_path: Path) -> None:
    with node(tmp_path / "q") as one:
        system = await client(one)
        from persisting.errors import InvalidArgument

        writer = await write_queue(system, "t", storage_path=str(tmp_path / "else"), durable=True)
        with pytest.raises(InvalidArgument, match=f"serves only topics in {tmp_path / 'q'}"):
            await writer.put({"id": 1})
        await system.shutdown()
        assert one.stop()[0] == 0


async def test_nodes_with_one_passphrase_form_a_cluster(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("open sesame\n")
    with two_nodes(tmp_path / "q", "--passphrase-file", secret) as nodes:
        system = await client(*nodes, passphrase="open sesame")
        writer = await write_queue(system, "t", storage_path=str(tmp_path / "q"), durable=True)
        await writer.put(numbered(range(20)))
        await writer.close()
        await system.shutdown()
        for one in nodes:
            assert (await asyncio.to_thread(one.stop))[0] == 0
    assert await stored(tmp_path / "q") == list(range(20))


def test_node_with_another_passphrase_does_not_start_alone(tmp_path: Path) -> None:
    with node(tmp_path, "--passphrase", "one") as one:
        words = ["--seed", one.address, "--passphrase", "two", "--join-timeout", "1s"]
        code, out, err = piped("serve", "-s", tmp_path, *words)
        assert (code, out) == (1, "")
        assert "no seed answered within 1 s" in err
        assert "passphrase" in err


def test_signal_while_waiting_for_a_seed_ends_the_command(tmp_path: Path) -> None:
    words = [*COMMAND, "serve", "-s", str(tmp_path), "--seed", "127.0.0.1:1"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as child:
        for _ in range(600):
            if _handles_sigterm(child.pid):
                break
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, b"")


def _handles_sigterm(pid: int) -> bool:
    """Whether a process has installed a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16)  # type: ignore[index]
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--address", "nonsense"], 2, "must be host:port"),
        (["--address", "127.0.0.1:99999"], 2, "must be host:port"),
        (["--address", "no.such.host.invalid:1"], 2, "unknown host"),
        (["--address", "192.0.2.1:7000"], 1, "cannot listen on 192.0.2.1:7000"),
        (["--seed", "x"], 2, "a seed must be host:port"),
        (["--passphrase", "a", "--passphrase-file", sys.executable], 2, "not both"),
        (["--passphrase-file", "/dev/null"], 2, "is empty"),
    ],
    ids=str,
)
def test_wrong_options_are_reported_in_one_line(
    tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    answer = piped("serve", "-s", tmp_path / "q", *words)
    assert (answer.code, answer.out, answer.err.count("\n")) == (code, "", 1), answer
    assert message in answer.err
    assert "should not happen" not in answer.err


def test_ports_that_are_taken_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = piped("serve", "-s", tmp_path, "--address", f"127.0.0.1:{port}")
        assert (answer.code, f"127.0.0.1:{port}" in answer.err) == (1, True)
        answer = piped("serve", "-s", tmp_path, "--metrics-port", port)
        assert (answer.code, "choose another port" in answer.err) == (1, True)


def test_systemd_unit_starts_a_node_that_the_command_line_accepts(
    call: Callable[..., Answer],
) -> None:
    unit = (ROOT / "ops/persisting-node.service").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    program, command, *words = shlex.split(line.replace("${CREDENTIALS_DIRECTORY}/", "/etc/"))
    assert (Path(program).name, command) == ("persisting", "serve")
    words = ["/etc/passwd" if word == "/etc/passphrase" else word for word in words]
    context = cli.commands["serve"].make_context("serve", words)
    assert context.params["metrics_port"] == 9464
    settings = dict(re.findall(r"^(\w+)=(.+)$", unit, re.MULTILINE))
    assert (settings["Type"], settings["KillMode"]) == ("notify", "mixed")
    assert int(settings["WatchdogSec"]) > 0
