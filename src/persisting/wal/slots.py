"""The objects of a log in an object store.

    log/<name>/lease.json            who writes the log, and which slots may be deleted
    log/<name>/slots/<slot:020d>     one group commit, or a claim

A slot is created if absent and never overwritten. A group commit has the bytes of a whole segment
(docs/reference/wal-format.md): header, start frame, schema, records. So the log of an owner is
replayed by the code that replays files. Only the owner writes group commits, one after the other
and from slot 0 on. A claim ends the log: a new owner creates one in the first slot that was never
used, and the former owner's next put, however late it arrives, is refused there.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec

from persisting.errors import WALError
from persisting.lock import IDENTITY
from persisting.wal.frame import (
    SEGMENT_HEADER_SIZE,
    Broken,
    Frame,
    decode_segment_header,
)
from persisting.wal.frame_run import FrameRun, read_run

LOGS = "log"
MOST_UNDER_WAY = 4
"""How many slots an owner may be storing at a time. It acknowledges them in order, so a slot after
a free one was never acknowledged, and at most this many less one come after a claim."""

_CLAIM = b"PSTCLAIM"
_NAME = re.compile(r"[0-9]{20}-[0-9a-f]{16}")


class Process(msgspec.Struct, frozen=True):
    """A process, for messages, and for clients of a cluster that search for the owner."""

    host: str
    pid: int
    node: str = ""
    """Its id as a storage node; empty if it is not one."""
    address: str = ""
    socket: str = ""
    """Where it listens for other processes of its machine; empty if it does not."""

    def __str__(self) -> str:
        node = f", node {self.node}" if self.node else ""
        return f"process {self.pid} on {self.host}{node}"


def this_process(listening_at: str = "") -> Process:
    """Return this process, which listens on the socket ``listening_at``."""
    node, address = IDENTITY.get("node", ""), IDENTITY.get("address", "")
    return Process(socket.gethostname(), os.getpid(), node, address, listening_at)


def new_log_name() -> str:
    """Return a name that no other log has; names sort by the time on the owner's clock."""
    return f"{time.time_ns():020d}-{secrets.token_hex(8)}"


def is_log_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def lease_key(log: str) -> str:
    return f"{LOGS}/{log}/lease.json"


def slots_prefix(log: str) -> str:
    return f"{LOGS}/{log}/slots"


def slot_key(log: str, slot: int) -> str:
    return f"{slots_prefix(log)}/{slot:020d}"


def slot_of(key: str) -> int:
    return int(key.rpartition("/")[2])


def first_free(used: Collection[int], first: int) -> int:
    """Return the first slot from ``first`` on that is not used."""
    slot = first
    while slot in used:
        slot += 1
    return slot


def new_claim() -> bytes:
    """Return the content of a claim, which no other claim has."""
    return _CLAIM + msgspec.json.encode([this_process(), secrets.token_hex(16)])


def is_claim(data: bytes) -> bool:
    return data.startswith(_CLAIM)


def slot_frames(data: bytes, place: str) -> Iterator[Frame]:
    """Yield the frames of a slot that was checked (:func:`check_slot`)."""
    for run in _runs(data, place):
        for index in range(len(run.positions)):
            yield run.frame(index)


def _runs(data: bytes, place: str) -> Iterator[FrameRun]:
    """Yield the frames of a slot in runs; raise if its content is not a whole segment.

    An object is stored whole or not at all, so there are no torn tails: anything broken is damage.
    """
    try:
        yield from _unchecked_runs(data)
    except Broken as exc:
        raise WALError(
            f"the log object {place} is damaged: {exc}. It holds acknowledged records; restore it "
            "from a copy or from an older version of the object"
        ) from exc


def _unchecked_runs(data: bytes) -> Iterator[FrameRun]:
    header = decode_segment_header(memoryview(data))
    position, sequence = SEGMENT_HEADER_SIZE, header.first_sequence
    while position < len(data):
        run = read_run(data, position, header.salt, sequence)
        if run.broken is not None:
            raise run.broken
        yield run
        position, sequence = run.end, run.next_sequence


def broken_slot(data: bytes) -> str | None:
    """Return why the content of a slot is not a whole segment with frames; None if it is."""
    try:
        runs = list(_unchecked_runs(data))
    except Broken as exc:
        return str(exc)
    return None if runs else "it is empty"


def complete_entries(data: bytes, place: str) -> bytes:
    """Return a segment up to its last complete entry; empty if it has none.

    Raises if what follows was synced: then it is damaged, and not torn.
    """
    try:
        header = decode_segment_header(memoryview(data))
    except Broken:
        return b""
    position, sequence, synced = SEGMENT_HEADER_SIZE, header.first_sequence, 0
    while position < len(data):
        run = read_run(data, position, header.salt, sequence)
        position, sequence = run.end, run.next_sequence
        synced = max(synced, int(run.headers["synced"].max(initial=0)))
        if run.broken is not None:
            if run.missing <= synced:
                raise WALError(f"the log {place} is damaged: {run.broken}")
            break
    return data[:position] if sequence > header.first_sequence else b""


class SlotSequences(NamedTuple):
    last: int
    """The last sequence in the slot."""
    durable: int
    """The last sequence that was known to be durable when the slot was begun."""


def check_slot(data: bytes, place: str) -> SlotSequences:
    """Return which sequences a slot has; raise if its content is not a whole segment."""
    durable: int | None = None
    last = 0
    for run in _runs(data, place):
        if durable is None:
            durable = int(run.headers["synced"][0])
        last = run.next_sequence - 1
    if durable is None:
        raise WALError(f"the log object {place} is damaged: it is empty")
    return SlotSequences(last, durable)
