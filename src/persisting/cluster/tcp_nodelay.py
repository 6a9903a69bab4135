"""Pulsing's server sockets wait to fill packets (Nagle): 40 ms for every small stream reply."""

from __future__ import annotations

import os
import socket
import stat


def send_at_once(address: str) -> None:
    """Set TCP_NODELAY on this process's listening socket; accepted ones inherit it (Linux)."""
    port = int(address.rsplit(":", 1)[1])
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            try:
                listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and duplicate.getsockname()[1] == port:
                    duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except (OSError, IndexError, TypeError):
                continue
