"""The process that samples every topic every few seconds, and writes what is new to its output.

It has a low priority and an interpreter of its own, so that a round through 1,000 topics does not
delay requests. It ends with its input: when the console ends, by whatever means, so does this.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import BinaryIO

import msgspec

from persisting.arrow_loading import load_without_pandas
from persisting.ui.store_view import view_of
from persisting.ui.topic_rounds import TopicRounds

_LEAST_PAUSE_SECONDS = 0.5


def main() -> None:
    """Sample the topics until the input ends."""
    storage, seconds = sys.argv[1], float(sys.argv[2])
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints must not mix with the messages
    logging.disable(logging.WARNING)
    threading.Thread(target=_end_with, args=(source,), daemon=True).start()
    load_without_pandas()
    rounds, encoder = TopicRounds(view_of(storage)), msgspec.msgpack.Encoder(enc_hook=str)
    while True:
        started = time.monotonic()
        for message in rounds.sample_all():
            body = encoder.encode(message)
            target.write(len(body).to_bytes(4, "big") + body)
            target.flush()
        time.sleep(max(seconds - (time.monotonic() - started), _LEAST_PAUSE_SECONDS))


def _end_with(source: BinaryIO) -> None:
    source.read()
    os._exit(0)


if __name__ == "__main__":
    main()
