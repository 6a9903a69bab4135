"""The write-ahead log: bytes in order, each synced before it is promised.

``frame`` the bytes, pure · ``segment`` one file · ``log`` many files, append mode · ``recovery``
read mode. It knows nothing of records or tables: payloads are opaque.
"""

from persisting.wal.log import Log, Payload
from persisting.wal.recovery import Recovery

FOLDER = "wal"

__all__ = ["FOLDER", "Log", "Payload", "Recovery"]
