"""Hosts as network namespaces: each has an address of its own, and only a bridge joins them.

Everything is inside namespaces that this module creates and removes: nothing of the machine's own
network changes, and no packet leaves it. Needs root and the program ``ip``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.object_stores import SeaweedFS, free_ports

_PREPARE = """
import sys, urllib.error, urllib.request
for method, url in (("POST", sys.argv[1]), ("GET", sys.argv[2])):
    try:
        urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5).close()
    except urllib.error.HTTPError as answer:
        if answer.code >= 500:
            raise
"""

_PROXY = """
import json, sys
from support.fault_proxy import FaultProxy

proxy, faults = FaultProxy(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])), []
for line in sys.stdin:
    proxy.heal()
    met = sum(fault.met for fault in faults)
    faults = [proxy.add(**fault) for fault in json.loads(line)]
    print(met, flush=True)
"""


def missing() -> str | None:
    """Return why hosts cannot be created, None if they can."""
    if shutil.which("ip") is None:
        return "the program ip is missing; install it: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root: run these tests as root"
    return None


class Network:
    """A bridge in a namespace, and hosts beside it."""

    def __init__(self) -> None:
        why = missing()
        if why is not None:
            raise RuntimeError(why)
        self._name = f"ps{secrets.token_hex(3)}"
        self._bridge = f"{self._name}-bridge"
        self._namespaces: list[str] = []
        self._hosts = 0
        self._add_namespace(self._bridge)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._namespaces.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def add_host(self) -> Host:
        """Create a host, and join it to the others."""
        self._hosts += 1
        namespace, port = f"{self._name}-{self._hosts}", f"port{self._hosts}"
        address = f"10.77.0.{self._hosts}"
        self._add_namespace(namespace)
        peer = ("peer", "name", "eth0", "netns", namespace)
        _ip("-n", self._bridge, "link", "add", port, "type", "veth", *peer)
        _ip("-n", self._bridge, "link", "set", port, "master", "br0", "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        return Host(namespace, address, self._bridge, port)

    def close(self) -> None:
        """Remove all hosts; their processes must have ended."""
        for namespace in reversed(self._namespaces):
            _ip("netns", "delete", namespace)
        self._namespaces = []


class Host:
    """A namespace with one link to the others."""

    def __init__(self, namespace: str, address: str, bridge: str, port: str) -> None:
        self.address, self._namespace = address, namespace
        self._bridge, self._port = bridge, port

    @property
    def prefix(self) -> list[str]:
        """The command that runs another one on this host."""
        return ["ip", "netns", "exec", self._namespace]

    def cut(self) -> None:
        """Let no packet pass the link."""
        _ip("-n", self._bridge, "link", "set", self._port, "down")

    def mend(self) -> None:
        _ip("-n", self._bridge, "link", "set", self._port, "up")


class HostedSeaweedFS(SeaweedFS):
    """SeaweedFS on a host of its own."""

    def __init__(self, folder: Path, host: Host) -> None:
        super().__init__(folder)
        self._host = host

    def command(self) -> list[str]:
        listening = {
            "-ip=127.0.0.1": f"-ip={self._host.address}",
            "-ip.bind=127.0.0.1": f"-ip.bind={self._host.address}",
        }
        return [*self._host.prefix, *(listening.get(part, part) for part in super().command())]

    def prepare(self) -> None:
        filer = f"http://{self._host.address}:{self.filer_port}/buckets/lab/"
        status = f"http://{self._host.address}:{self.port}/status"
        command = [*self._host.prefix, sys.executable, "-c", _PREPARE, filer, status]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise OSError("the server does not answer yet")

    def options(self, **more: str) -> dict[str, str]:
        endpoint = f"http://{self._host.address}:{self.port}"
        return {**super().options(**more), "aws_endpoint": endpoint}


class HostedFaultProxy:
    """A :class:`~support.fault_proxy.FaultProxy` on the host of a server."""

    def __init__(self, server: HostedSeaweedFS, host: Host) -> None:
        (self.port,) = free_ports(1)
        self._endpoint = f"http://{host.address}:{self.port}"
        self._server = server
        command = [sys.executable, "-c", _PROXY]
        self._child = subprocess.Popen(
            [*host.prefix, *command, str(server.port), host.address, str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        self.replace_faults()

    def replace_faults(self, *faults: dict[str, Any]) -> int:
        """Have these faults from now on; return how many requests have met the former ones."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(faults) + "\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline())

    def options(self) -> dict[str, str]:
        """Return the options that reach the server through the proxy."""
        return {**self._server.options(), "aws_endpoint": self._endpoint}

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
