"""tools/install_chromium.py installs a browser once, and says how if it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.doc_pages import ROOT

APT = """#!/bin/sh
echo "$@" >> "{folder}/asked"
{then}
"""


def installed(folder: Path, then: str = "exit 1") -> subprocess.CompletedProcess[str]:
    """Run the tool where only ``apt-get`` is found, which then runs a command."""
    apt = folder / "apt-get"
    apt.write_text(APT.format(folder=folder, then=then))
    apt.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": str(folder),
        # Playwright's registry does not answer, and none of its browsers is there.
        "PLAYWRIGHT_DOWNLOAD_HOST": "http://127.0.0.1:9",
        "PLAYWRIGHT_BROWSERS_PATH": str(folder / "playwright"),
    }
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/install_chromium.py")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )


def test_browser_that_is_there_is_not_installed_again(tmp_path: Path) -> None:
    (tmp_path / "chromium").touch(0o755)
    assert installed(tmp_path).returncode == 0
    assert not (tmp_path / "asked").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="packages are installed by root")
def test_browser_comes_from_the_packages_of_the_machine(tmp_path: Path) -> None:
    then = f'[ "$1" = update ] || : > "{tmp_path}/chromium"; /bin/chmod +x "{tmp_path}/chromium"'
    done = installed(tmp_path, then)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().splitlines() == [
        "update -qq",
        "install -y -qq chromium",
    ]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("then", ["exit 100", "exit 0"], ids=["failed", "installed nothing"])
def test_browser_that_cannot_be_installed_says_how(tmp_path: Path, then: str) -> None:
    done = installed(tmp_path, then)
    assert done.returncode == 1
    assert "apt-get install chromium" in done.stderr
