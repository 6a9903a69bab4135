"""Takes the screenshots of the console in the documentation, from the data that the demo left.

make demo && .venv/bin/python docs/tools/screenshots.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TOPIC = "/topics/trajectories"
SCREENS = {
    "console-topics": ("/", 300),
    "console-records": (f"{TOPIC}/records?limit=15", 560),
    "console-search": (f"{TOPIC}/search?text=race+bucket&k=4", 720),
    "console-run": (f"{TOPIC}/trajectories", 720),
}
"""Path and height by the name of the picture."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
WIDTH = 1200
_SAMPLES_SECONDS = 11
"""The charts need two samples."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", type=Path, default=ROOT / "demo_output" / "queues")
    parser.add_argument("--target", type=Path, default=ROOT / "docs" / "assets")
    given = parser.parse_args()
    if not given.storage.is_dir():
        parser.error(f"there is no folder {given.storage}; run 'make demo' first")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    command = [sys.executable, "-m", "persisting.cli", "ui", "-p", "0"]
    command += ["-s", os.path.abspath(given.storage)]
    console = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert console.stdout is not None
        address = console.stdout.readline().split()[1].rstrip("/")
        time.sleep(_SAMPLES_SECONDS)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
            page = browser.new_context(locale="en-GB").new_page()
            for name, (screen, height) in SCREENS.items():
                page.set_viewport_size({"width": WIDTH, "height": height})
                page.goto(address + screen)
                if name == "console-run":
                    page.click("tr[data-row] a")
                    page.wait_for_url("**/run?*")
                page.screenshot(path=given.target / f"{name}.png")
                print(given.target / f"{name}.png")
            browser.close()
    finally:
        console.terminate()
        console.wait(30)


if __name__ == "__main__":
    main()
