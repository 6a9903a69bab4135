"""Where a write goes: what the driver does with a topic in a folder, or in an object store.

Both forms prepare the tables before tasks run, and commit the files of the tasks bucket by bucket.
A process that has a bucket open does both itself (:mod:`persisting.topic.handover`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket import bulk_import
from persisting.bucket.handover_notes import ADOPT, Note, encoded_schema, handed_files
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import SharedSchema
from persisting.errors import BucketLocked, StorageError
from persisting.store_address import StoreAddress
from persisting.table import leftovers
from persisting.table.bulk_files import BulkFiles, names_of
from persisting.table.table import FOLDER, Table
from persisting.topic import handover
from persisting.topic import spec as topics
from persisting.topic.local import agreed_config
from persisting.topic.ownership import owned
from persisting.topic.spec import TopicConfig, TopicSpec, bucket_folder
from persisting.topic.topic_files import TopicFolder

Fragments = list[dict[str, Any]]
Sequence = tuple[str, int]
"""The producer sequence of a write: its name and number. A bucket stores each pair once."""


class BucketFiles(NamedTuple):
    """What the tasks wrote for one bucket."""

    fragments: Fragments
    columns: list[dict[str, Any]]
    schema: pa.Schema


class Target(Protocol):
    """A topic that rows are written to; it may not exist yet."""

    new_options: Mapping[str, Any]
    """Options that a new topic needs."""

    def load(self) -> TopicConfig | None:
        """Return the configuration of the topic; raise unless its backend stores tables."""

    def shared_schema(self) -> SharedSchema: ...

    def check_owners(self, config: TopicConfig) -> None:
        """Raise if a process has the topic open that stands in the way of the write."""

    def agree(self, spec: TopicSpec) -> TopicConfig:
        """Create the topic, or change its options, where needed."""

    def prepare(self, config: TopicConfig, schema: pa.Schema) -> dict[int, dict[str, Any]]:
        """Bring all tables to a schema; return by bucket what writers of files need to know."""

    def commit(
        self,
        config: TopicConfig,
        files: Mapping[int, BucketFiles],
        sequence: Sequence,
        *,
        overwrite: bool,
    ) -> int:
        """Commit the files of tasks; return how many rows are new."""

    def discard(
        self, config: TopicConfig, files: Mapping[int, Fragments], sequence: Sequence | None
    ) -> None:
        """Remove the files of tasks of a write that has failed, where its rows are not stored."""


def target_of(place: Path | StoreAddress, owner_seconds: float) -> Target:
    """Return the target at a folder, or at an address in an object store."""
    if isinstance(place, StoreAddress):
        from persisting.spark.store_target import StoreTarget

        return StoreTarget(place, owner_seconds)
    return FolderTarget(place, owner_seconds)


def bulk_files(place: str | Path | StoreAddress, bucket: int) -> BulkFiles:
    """Return the data files of a bucket's table, for a task; an address is not text here."""
    if isinstance(place, StoreAddress):
        from persisting.store.storage_options import StorageOptions
        from persisting.table.store_bulk_files import StoreBulkFiles

        return StoreBulkFiles(place / topics.bucket_name(bucket) / FOLDER, StorageOptions())
    return BulkFiles(bucket_folder(Path(place), bucket) / FOLDER, filesystem.current())


@contextmanager
def counted(added: Mapping[int, int], buckets: int) -> Iterator[None]:
    """Say in an error how many buckets have stored their rows before it, if any have."""
    try:
        yield
    except StorageError as exc:
        if not added:
            raise
        raise StorageError(
            f"{exc}. {len(added)} of {buckets} buckets have stored their rows before: repeat the "
            "write only with the same writeId, which stores what is missing"
        ) from exc


class FolderTarget:
    """A topic in a folder."""

    new_options: Mapping[str, Any] = {}

    def __init__(self, folder: Path, owner_seconds: float) -> None:
        self._folder, self._seconds = folder, owner_seconds

    def load(self) -> TopicConfig | None:
        if not topics.has_file(self._folder):
            topics.load(self._folder, filesystem.current())  # raises for a backup
            return None
        return TopicFolder.open(self._folder).config

    def shared_schema(self) -> SharedSchema:
        return SharedSchema(self._folder / SCHEMA_FILE, filesystem.current())

    def check_owners(self, config: TopicConfig) -> None:
        """An owner that does not answer is found before the schema of the topic changes."""
        handover.ping(self._folder, config, self._seconds)

    def agree(self, spec: TopicSpec) -> TopicConfig:
        _, config, _ = agreed_config(spec, self._folder.parent)
        return config

    def prepare(self, config: TopicConfig, schema: pa.Schema) -> dict[int, dict[str, Any]]:
        """Prepare the buckets in this process, or through their owners if there are any."""
        buckets = range(config.num_buckets)
        try:
            if not handover.is_owned(self._folder, buckets):
                tables = {}
                for bucket in buckets:
                    with owned(self._folder, config, bucket) as owner:
                        tables[bucket] = bulk_import.prepare(owner.bucket, schema)
                return tables
        except BucketLocked:
            pass  # a queue has just opened a bucket
        return handover.prepare(self._folder, config, schema, self._seconds)

    def commit(
        self,
        config: TopicConfig,
        files: Mapping[int, BucketFiles],
        sequence: Sequence,
        *,
        overwrite: bool,
    ) -> int:
        """This process commits bucket by bucket. If another one has any of them open, the files are
        handed over, and all of them become part of the topic in one step."""
        added: dict[int, int] = {}
        with counted(added, len(files)):
            if not handover.is_owned(self._folder, files):
                with suppress(BucketLocked):  # a queue has just opened a bucket
                    for bucket, found in files.items():
                        with owned(self._folder, config, bucket) as owner:
                            added[bucket] = bulk_import.adopt(
                                owner.bucket,
                                found.fragments,
                                found.columns,
                                *sequence,
                                replace=overwrite,
                            )
            if left := {b: found for b, found in files.items() if b not in added}:
                notes = {b: note_of(found, sequence, overwrite) for b, found in left.items()}
                added |= handover.adopt(self._folder, config, notes, self._seconds)
        # Where nothing is new, an earlier attempt stored these rows from other files.
        unused = {b: files[b].fragments for b, rows in added.items() if not rows}
        self.discard(config, unused, sequence)
        return sum(added.values())

    def discard(
        self, config: TopicConfig, files: Mapping[int, Fragments], sequence: Sequence | None
    ) -> None:
        """Remove the files to which neither a version of a table nor a note refers."""
        fs = filesystem.current()
        for bucket, fragments in files.items():
            place = bucket_folder(self._folder, bucket)
            names = set(names_of(fragments))
            leftovers.remove_unused(Table(place, fs), names - handed_files(place, fs))


def note_of(files: BucketFiles, sequence: Sequence, overwrite: bool) -> Note:
    """Return the note that hands files over to the owner of their bucket."""
    writer, number = sequence
    return Note(
        kind=ADOPT,
        writer=writer,
        number=number,
        replace=overwrite,
        rows=sum(fragment["physical_rows"] for fragment in files.fragments),
        fragments=files.fragments,
        columns=files.columns,
        schema=encoded_schema(files.schema),
    )
