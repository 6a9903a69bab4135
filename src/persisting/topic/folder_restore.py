"""Restores a backup as a topic in a folder. Blocking."""

from __future__ import annotations

from pathlib import Path

import msgspec

from persisting import fs as filesystem
from persisting.topic import spec as topics
from persisting.topic.backup_files import Copy
from persisting.topic.backup_form import DEFINITION, Backup
from persisting.topic.spec import TopicConfig

_STORE_ONLY = ("linger", "linger_bytes", "lease")
"""Options that a folder does not have."""


def restore(backup: Backup, config: TopicConfig, copy: Copy, folder: Path) -> None:
    """Copy all files, the topic's definition last: without it the folder is not a topic."""
    for name, expected in backup.files.items():
        if name not in (topics.FILE, DEFINITION):
            copy.checked(name, expected)
    copy.finish()
    renamed = msgspec.structs.replace(config, topic=folder.name, options=_options(backup, config))
    topics.save(folder, renamed, filesystem.current())


def _options(backup: Backup, config: TopicConfig) -> dict[str, object]:
    """Return the options of the topic. One from an object store keeps its promise: what was
    acknowledged is durable."""
    if DEFINITION not in backup.files and not any(b.term for b in backup.buckets):
        return config.options
    kept = {k: v for k, v in config.options.items() if k not in _STORE_ONLY}
    return {**kept, "wal_sync_interval": 0.0} if kept.get("enable_wal") else kept
