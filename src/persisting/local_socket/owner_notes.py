"""Who owns the buckets of a topic, and where that process listens: in locks, or in a store."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from persisting.bucket.store_ownership import FREE, owner_register
from persisting.errors import WALError
from persisting.local_socket.connection import SILENT_CHECKS
from persisting.lock import owner_of
from persisting.store.object_store import ObjectStore
from persisting.topic.spec import bucket_folder, bucket_name
from persisting.wal import sealing

_CHANGING = {"passing": True}
"""The note of an owner that is about to start or to end."""


class OwnerNotes(Protocol):
    """The notes of the owners of a topic's buckets."""

    pause_seconds: float
    """How long to wait before a note is read again."""

    answer_seconds: float | None
    """How long an owner may take to say that it is there; None: as long as any other answer."""

    silent_checks: int
    """See :data:`~persisting.local_socket.connection.SILENT_CHECKS`."""

    elsewhere_hint: str
    """What to do about an owner that this process cannot reach."""

    def read(self, bucket: int) -> dict[str, Any] | None:
        """Return the note of a bucket's owner, None if nobody owns it. Blocking."""

    def place(self, bucket: int) -> str:
        """Return where a bucket is, for messages."""


class FolderOwnerNotes:
    """The notes in the locks of the buckets."""

    pause_seconds = 0.02
    answer_seconds: float | None = None
    silent_checks = SILENT_CHECKS
    elsewhere_hint = (
        "close it there, read it here with read_queue, or let both processes join a cluster"
    )

    def __init__(self, folder: Path) -> None:
        """``folder`` is the topic's."""
        self._folder = folder

    def read(self, bucket: int) -> dict[str, Any] | None:
        return owner_of(bucket_folder(self._folder, bucket))

    def place(self, bucket: int) -> str:
        return str(bucket_folder(self._folder, bucket))


class StoreOwnerNotes:
    """The notes in the leases of the logs in an object store.

    A killed owner counts as one until its lease has ended; nobody answers on its socket meanwhile.
    One that is stopped loses its buckets, too: so it is not waited for as long as in a folder.
    """

    pause_seconds = 0.25
    answer_seconds: float | None = 3.0
    silent_checks = 2
    elsewhere_hint = (
        "close it there, or, to write on several machines, pass a system of a cluster to "
        "write_queue"
    )

    def __init__(self, store: ObjectStore) -> None:
        """``store`` is that of the topic."""
        self._store = store

    def read(self, bucket: int) -> dict[str, Any] | None:
        register = owner_register(self._store, bucket)
        held = register.read()
        if held is None or held.content.owner == FREE:
            return None
        try:
            lease = sealing.look_at_owner(self._store, held.content.owner)
        except WALError:  # it may have closed the bucket, and deleted its log, meanwhile
            now = register.read()
            if now is not None and now.version == held.version:
                raise
            return dict(_CHANGING)
        if lease is None:
            return None
        note = msgspec.to_builtins(lease.owner) | {"passing": lease.passing}
        return {name: value for name, value in note.items() if value}

    def place(self, bucket: int) -> str:
        return str(self._store.address / bucket_name(bucket))


def is_this_process(note: Mapping[str, Any]) -> bool:
    """Whether a note is one of this process; another machine may have a process of its number."""
    return bool(note.get("pid") == os.getpid() and note.get("host") in (None, socket.gethostname()))
