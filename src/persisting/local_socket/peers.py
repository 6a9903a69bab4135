"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

_LINUX = struct.Struct("3i")
_XUCRED_BYTES = 76
_SOL_LOCAL = 0


class Peer(NamedTuple):
    """The process at the other end."""

    pid: int | None
    """None if the system does not say."""
    user: int

    @property
    def is_same_user(self) -> bool:
        return self.user == os.geteuid()


def peer_of(connected: socket.socket) -> Peer:
    """Return the process at the other end of a connected socket."""
    if hasattr(socket, "SO_PEERCRED"):
        data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _LINUX.size)
        pid, user, _ = _LINUX.unpack(data)
        return Peer(pid, user & 0xFFFFFFFF)
    # macOS and the BSDs: struct xucred begins with a version and the user.
    data = connected.getsockopt(_SOL_LOCAL, 1, _XUCRED_BYTES)
    return Peer(None, struct.unpack_from("2I", data)[1])
