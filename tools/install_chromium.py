"""Installs Chromium for the tests of the console, unless the machine has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PLAYWRIGHT = Path(sys.executable).parent / "playwright"


def main() -> int:
    """Install it from the machine's packages, else from Playwright's registry."""
    if is_installed():
        return 0
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing chromium with apt-get (takes a minute)", flush=True)
        _succeeds("apt-get", "update", "-qq")
        if _succeeds("apt-get", "install", "-y", "-qq", "chromium") and is_installed():
            return 0
    if PLAYWRIGHT.exists():
        print("installing chromium from Playwright's registry (takes a minute)", flush=True)
        if _succeeds(str(PLAYWRIGHT), "install", "chromium"):
            return 0
    print(
        "Chromium could not be installed, so the tests of the console will fail. Install it with "
        "'apt-get install chromium', or with '.venv/bin/playwright install chromium'.",
        file=sys.stderr,
    )
    return 1


def is_installed() -> bool:
    """Return whether a browser is where the tests look for one."""
    return any(shutil.which(name) for name in NAMES)


def _succeeds(*command: str) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, check=False, env=environment).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
