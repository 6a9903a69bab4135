"""The definition of a topic: its buckets, their backend and options, stored in one small file."""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from typing import Any

import msgspec

from persisting import json_files
from persisting.errors import InvalidArgument, StorageError
from persisting.fs import FileSystem
from persisting.options import storage_folder
from persisting.suggestions import choices
from persisting.topic.topic_names import check_name

FILE = "topic.json"
LOCK_FILE = ".topic.lock"
"""Held while the topic file is changed."""
BACKUP_FILE = "backup.json"
"""Marks a backup of a topic, which must not be opened as one."""
FORMAT = 2
"""Since format 2 the buckets of a topic share a log, which earlier versions would not read."""
DEFAULT_ROOT = "./queue_storage"
DEFAULT_COLUMN = "id"
DEFAULT_BUCKETS = 4
DEFAULT_BATCH = 100
_MAX_BUCKETS = 65536
_TABLES = ("lance", "persisting")

_ARGUMENTS = ("bucket_id", "storage_path", "batch_size")
"""Arguments that a topic passes to each of its buckets."""
_OPENER_OPTIONS = ("read_only", "schema_path", "groups_path", "owner_log")
"""Options of the table backends that are set by the code that opens a bucket."""


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of ``topic.json``."""

    topic: str
    num_buckets: int
    bucket_column: str
    backend: str
    batch_size: int = DEFAULT_BATCH
    options: dict[str, Any] = {}
    format: int = 1
    id: str = ""
    """Random: tells a recreated topic from the earlier one of the same name."""


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks of a topic; None for what the call leaves open."""

    topic: str
    num_buckets: int | None = None
    bucket_column: str | None = None
    backend: str | None = None
    also: str | None = None
    """A second name of the same backend: the class's own, if it is registered under another."""
    batch_size: int | None = None
    options: dict[str, Any] | None = None

    def check(self) -> None:
        check_name("topic", self.topic)
        if self.num_buckets is not None:
            if type(self.num_buckets) is not int or not 1 <= self.num_buckets <= _MAX_BUCKETS:
                raise InvalidArgument(
                    f"num_buckets must be a whole number from 1 to {_MAX_BUCKETS}, "
                    f"got {self.num_buckets!r}"
                )
        if self.bucket_column is not None:
            if not isinstance(self.bucket_column, str) or not self.bucket_column:
                raise InvalidArgument(
                    f"bucket_column must name a field, got {self.bucket_column!r}"
                )
        if self.batch_size is not None:
            if type(self.batch_size) is not int or self.batch_size < 1:
                raise InvalidArgument(
                    f"batch_size must be a whole number from 1, got {self.batch_size!r}"
                )
        if self.options is not None:
            _check_options(self.options)

    def new(self) -> TopicConfig:
        """Return the configuration of a new topic."""
        backend = self.backend or "memory"
        self._check_for(backend)
        return TopicConfig(
            topic=self.topic,
            num_buckets=self.num_buckets or DEFAULT_BUCKETS,
            bucket_column=self.bucket_column or DEFAULT_COLUMN,
            backend=backend,
            batch_size=self.batch_size or DEFAULT_BATCH,
            options=dict(self.options or {}),
            format=_format(backend, self.options or {}),
            id=uuid.uuid4().hex,
        )

    def applied_to(self, known: TopicConfig) -> TopicConfig:
        """Return an existing topic's configuration with these changes; raise for a conflict."""
        self._must_equal("num_buckets", known.num_buckets)
        self._must_equal("bucket_column", known.bucket_column)
        backend = self._backend_after(known.backend)
        self._check_for(backend)
        options = {**known.options, **(self.options or {})}
        return msgspec.structs.replace(
            known,
            backend=backend,
            batch_size=self.batch_size or known.batch_size,
            options=options,
            format=max(known.format, _format(backend, options)),
        )

    def _check_for(self, backend: str) -> None:
        if backend in _TABLES:
            refuse_opener_options(self.options or {})

    def _must_equal(self, name: str, known: Any) -> None:
        given = getattr(self, name)
        if given is not None and given != known:
            raise InvalidArgument(
                f"topic {self.topic!r} has {name}={known!r}, not {given!r}: it is fixed when the "
                "topic is created. Leave it out, or use another topic"
            )

    def _backend_after(self, known: str) -> str:
        if self.backend is None or known in (self.backend, self.also):
            return known
        if (known, self.backend) == ("lance", "persisting"):
            return self.backend
        raise InvalidArgument(
            f"topic {self.topic!r} has the backend {known!r}, which cannot become "
            f"{self.backend!r}"
            + ("; its log and evolved schema need 'persisting'" if known == "persisting" else "")
        )


def _format(backend: str, options: dict[str, Any]) -> int:
    """Return the format that a topic needs: 2 if its buckets share a log."""
    return FORMAT if backend not in ("memory", "lance") and options.get("enable_wal") else 1


def _check_options(options: Any) -> None:
    if not isinstance(options, dict):
        raise InvalidArgument(f"backend_options must be a dict, got {type(options).__name__}")
    for name in options:
        if not isinstance(name, str):
            raise InvalidArgument(f"backend_options must have names as keys, got {name!r}")
    if "bucket_id" in options:
        raise InvalidArgument(
            "bucket_id is not an option of a topic: each of its buckets has its own number"
        )
    for name in _ARGUMENTS:
        if name in options:
            raise InvalidArgument(
                f"{name} is an argument of write_queue, not a backend option: "
                f"write_queue(…, {name}={options[name]!r})"
            )


def refuse_opener_options(options: dict[str, Any]) -> None:
    """Raise for an option that would stop all writers of a topic, or move its files elsewhere."""
    if "read_only" in options:
        raise InvalidArgument(
            "read_only is not an option of a topic: read_queue reads a topic without its lock, "
            "write_queue opens it for writing"
        )
    for name in _OPENER_OPTIONS:
        if name in options:
            raise InvalidArgument(f"{name} is set by the topic and is not an option; leave it out")


def warn_of_changes(old: TopicConfig, new: TopicConfig) -> None:
    """Warn that an existing topic continues with other options."""
    if new.options != old.options:
        warnings.warn(
            f"topic {old.topic!r} had the options {old.options}; from now on {new.options} apply "
            "to new records",
            UserWarning,
            stacklevel=2,
        )


def topic_folder(storage_path: str | Path | None, topic: str) -> Path:
    """Return the folder of a topic."""
    root = DEFAULT_ROOT if storage_path is None else storage_path
    return storage_folder(root) / check_name("topic", topic)


def no_such_topic(folder: Path) -> str:
    """Return the message for a topic that does not exist, with the names that may be meant."""
    message = f"there is no topic {folder.name!r} in {folder.parent}"
    children = sorted(path.parent.name for path in folder.glob(f"*/{FILE}"))
    if children:
        return f"{message}: it is a folder of topics. Name one of them: {', '.join(children[:10])}."
    if not folder.parent.is_dir():
        return f"{message}: there is no such folder. Check the storage folder."
    siblings = sorted(path.parent.name for path in folder.parent.glob(f"*/{FILE}"))
    if not siblings:
        return f"{message}, which contains no topics. Check the storage folder."
    hint = choices(folder.name, siblings)
    return f"{message}; {hint}" if hint.endswith("?") else f"{message}; {hint}."


def bucket_name(bucket: int) -> str:
    """Return the name of a bucket's folder, or of its prefix in an object store."""
    return f"bucket_{bucket}"


def bucket_folder(folder: Path, bucket: int) -> Path:
    return folder / bucket_name(bucket)


def load(folder: Path, fs: FileSystem) -> TopicConfig | None:
    """Return the configuration of the topic in ``folder``, None if there is no topic."""
    if has_file(folder, BACKUP_FILE):
        raise StorageError(
            f"{folder} is a backup and cannot be opened as a topic; restore it to a topic with "
            "'persisting backup restore'"
        )
    return load_any(folder, fs)


def has_file(folder: Path, name: str = FILE) -> bool:
    """Whether a folder has a file, by default that of a topic; raise if this user may not look."""
    try:
        return (folder / name).exists()
    except OSError as exc:
        raise _unreadable(folder / name, exc) from exc


def load_any(folder: Path, fs: FileSystem) -> TopicConfig | None:
    """Like :func:`load`, but accept a backup too."""
    try:
        data = fs.read(folder / FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise _unreadable(folder / FILE, exc) from exc
    return decode(data, folder / FILE)


def _unreadable(path: Path, exc: OSError) -> StorageError:
    hint = "fix the cause and retry"
    if isinstance(exc, PermissionError):
        hint = (
            "its folder belongs to another user. Change the permissions of the folder, or let the "
            "other user serve the topic on a cluster"
        )
    return StorageError(f"cannot read {path}: {exc.strerror or exc}; {hint}")


def decode(data: bytes, path: Path | str) -> TopicConfig:
    """Return the configuration in a topic file, or raise."""
    json_files.check_format(data, path, FORMAT)
    try:
        config = json_files.decode(data, TopicConfig)
    except msgspec.DecodeError as exc:
        raise StorageError(
            f"the topic file {path} is damaged ({exc}); restore it from a copy"
        ) from exc
    if not 1 <= config.num_buckets <= _MAX_BUCKETS:
        raise StorageError(
            f"the topic file {path} is damaged: num_buckets={config.num_buckets}; restore "
            "it from a copy"
        )
    return _without_foreign_options(config)


def _without_foreign_options(config: TopicConfig) -> TopicConfig:
    """Drop what earlier versions stored among the options though it is not an option."""
    foreign = _ARGUMENTS + (_OPENER_OPTIONS if config.backend in _TABLES else ())
    options = {name: value for name, value in config.options.items() if name not in foreign}
    return msgspec.structs.replace(config, options=options)


def check_storable(config: TopicConfig) -> bytes:
    """Return the configuration as JSON; raise if it would be read back as another."""
    try:
        data = msgspec.json.encode(config)
        if msgspec.json.decode(data, type=TopicConfig) != config:
            raise TypeError("a value would be read back as another")
    except (TypeError, msgspec.ValidationError) as exc:
        raise InvalidArgument(
            f"backend_options of topic {config.topic!r} cannot be stored in its file: {exc}; "
            "use numbers, text, lists and dicts"
        ) from exc
    return data


def save(folder: Path, config: TopicConfig, fs: FileSystem) -> None:
    """Write the topic file, atomically and durably."""
    data = msgspec.json.format(check_storable(config), indent=2)
    try:
        fs.make_folder(folder)
        fs.write_file(folder / FILE, data + b"\n")
    except OSError as exc:
        raise StorageError(f"cannot write {folder / FILE}: {exc.strerror or exc}") from exc
