"""The write-ahead log: bytes in order, synced before they are acknowledged as durable.

``frame`` the bytes, pure · ``frame_run`` many frames together · ``segment`` one file · ``log`` many
files, append mode · ``recovery`` read mode · ``inspection`` reports and repair. In an object store:
``slots`` its objects · ``lease`` who writes them · ``object_log`` append mode · ``sealing`` taking
over. Payloads are opaque: the log knows neither records nor tables.
"""

from persisting.wal.log import AppendLog, Log, Payload
from persisting.wal.recovery import Recovery

FOLDER = "wal"

__all__ = ["FOLDER", "AppendLog", "Log", "Payload", "Recovery"]
