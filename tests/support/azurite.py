"""Azurite, the emulator of Azure Blob Storage from npm, for the nightly tests.

It is installed once into the environment of the tests, from the registry of npm.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import http.client
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlencode

from support.object_stores import BUCKET, Server, free_ports

VERSION = "3.37.0"
ACCOUNT = "testaccount"
KEY = base64.b64encode(hashlib.sha512(b"the key of the tests").digest()).decode()
_API = "2021-12-02"
_INSTALL_SECONDS = 900


class Azurite(Server):
    """The program ``azurite-blob``; it keeps its blobs in ``folder``."""

    scheme = "az"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)

    def command(self) -> list[str]:
        return [
            *("node", str(installed_program()), "--silent", "--disableTelemetry"),
            *("--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
            *("--location", str(self.folder / "blobs"), "--skipApiVersionCheck"),
        ]

    def environment(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}

    def prepare(self) -> None:
        """Create the container."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        path = f"/{ACCOUNT}/{BUCKET}"
        try:
            headers = _signed("PUT", path, {"restype": "container"})
            connection.request("PUT", f"{path}?restype=container", body=b"", headers=headers)
            answer = connection.getresponse()
            text = answer.read()
        except http.client.HTTPException as exc:
            raise OSError(f"Azurite does not answer yet: {exc}") from None
        finally:
            connection.close()
        if answer.status not in (201, 409):
            raise RuntimeError(f"Azurite answered {answer.status}: {text!r}")

    def options(self, **more: str) -> dict[str, str]:
        return {
            "azure_storage_account_name": ACCOUNT,
            "azure_storage_account_key": KEY,
            "azure_storage_endpoint": f"http://127.0.0.1:{self.port}/{ACCOUNT}",
            "allow_http": "true",
            "pool_idle_timeout": "2s",  # Node.js closes idle connections after 5 s
            **more,
        }

    def options_with_token(self, token: str) -> dict[str, str]:
        """Return options with a shared access signature instead of the account's key."""
        options = self.options(azure_storage_sas_token=token)
        del options["azure_storage_account_key"]
        return options


def environment_of(options: dict[str, str]) -> dict[str, str]:
    """Return options as variables of an environment."""
    named = {"allow_http": "AZURE_ALLOW_HTTP"}
    return {named.get(name, name.upper()): value for name, value in options.items()}


def installed_program() -> Path:
    """Return the program; install it first if this environment does not have it."""
    folder = Path(sys.prefix) / f"azurite-{VERSION}"
    program = folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    done = folder / "installed"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of one test run share the folder
        if not done.exists():
            _install(folder)
            done.touch()
    return program


def _install(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(
            "the tests of az:// need Azurite, which npm installs; install Node.js with npm: "
            "apt-get install npm"
        )
    flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--omit=dev"]
    command = [npm, "install", "--prefix", str(folder), *flags, f"azurite@{VERSION}"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_INSTALL_SECONDS
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {ended.stderr[-2000:]}")


def shared_access_token(permissions: str = "rwdlac") -> str:
    """Return a shared access signature of the account, valid for a day."""
    now = datetime.now(timezone.utc)
    begin, end = ((now + timedelta(days=d)).strftime("%Y-%m-%dT%H:%M:%SZ") for d in (-1, 1))
    fields = {"sp": permissions, "ss": "b", "srt": "sco", "st": begin, "se": end}
    signed = [ACCOUNT, *fields.values(), "", "https,http", _API, "", ""]
    signature = _signature("\n".join(signed))
    return urlencode({"sv": _API, **fields, "spr": "https,http", "sig": signature})


def _signed(method: str, path: str, query: dict[str, str]) -> dict[str, str]:
    """Return the headers of a request without a body, signed with the account's key."""
    now = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": now, "x-ms-version": _API}
    lines = [method, *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
    lines += [f"/{ACCOUNT}{path}", *(f"{name}:{value}" for name, value in query.items())]
    return {**headers, "Authorization": f"SharedKey {ACCOUNT}:{_signature(chr(10).join(lines))}"}


def _signature(text: str) -> str:
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()
