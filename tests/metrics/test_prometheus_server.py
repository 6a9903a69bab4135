"""A real Prometheus reads the rules and the configuration, and scrapes a real process."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import pytest

OPS = Path(__file__).parents[2] / "ops"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the paths of ``prometheus`` and ``promtool``, installed or from Debian's package."""
    names = ("prometheus", "promtool")
    found = {name: shutil.which(name) for name in names}
    if all(found.values()):
        return found  # type: ignore[return-value]
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("neither prometheus nor apt-get is installed")
    folder = tmp_path_factory.mktemp("prometheus")
    subprocess.run(["apt-get", "update"], check=False, capture_output=True)
    subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    return {name: str(folder / "usr/bin" / name) for name in names}


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts.test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_ops_files(programs, command):
    done = subprocess.run(
        [programs["promtool"], *command], cwd=OPS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """A running server that scrapes one target every second."""

    def __init__(self, program: str, folder: Path, target: str) -> None:
        config = (OPS / "prometheus.yml").read_text()
        shutil.copy(OPS / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(
            config.replace("127.0.0.1:9464", target).replace("15s", "1s")
        )
        self._port = free_port()
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        url = f"http://127.0.0.1:{self._port}/api/v1/query?query={quote(expression)}"
        try:
            with urlopen(url, timeout=5) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return [(item["metric"], float(item["value"][1])) for item in result]

    def wait_for(self, expression: str, value: float) -> dict[str, str]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for labels, found in self.query(expression):
                if found == value:
                    return labels
            time.sleep(0.3)
        raise AssertionError(f"{expression} never became {value}: {self.query(expression)}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@pytest.fixture
def prometheus(programs, server, tmp_path) -> Iterator[Prometheus]:
    running = Prometheus(programs["prometheus"], tmp_path, f"127.0.0.1:{server.server_port}")
    yield running
    running.stop()


async def test_prometheus_scrapes_the_record_counter(prometheus, open_bucket):
    import asyncio

    async with open_bucket("scraped", bucket=3) as backend:
        await backend.put_batch([{"n": n} for n in range(42)])
        expression = 'persisting_records_total{topic="scraped"}'
        labels = await asyncio.to_thread(prometheus.wait_for, expression, 42)
        assert (labels["topic"], labels["bucket"], labels["job"]) == ("scraped", "3", "persisting")
        await backend.flush()
        count = 'persisting_flush_duration_seconds_count{topic="scraped"}'
        await asyncio.to_thread(prometheus.wait_for, count, 1)
        assert prometheus.query("up") != []


def test_prometheus_loads_every_alert(prometheus):
    prometheus.wait_for("up", 1)
    with urlopen(f"http://127.0.0.1:{prometheus._port}/api/v1/rules", timeout=5) as answer:
        (group,) = json.load(answer)["data"]["groups"]
    assert len(group["rules"]) == (OPS / "alerts.yml").read_text().count("- alert:")
    assert all(rule["health"] in ("ok", "unknown") for rule in group["rules"])
