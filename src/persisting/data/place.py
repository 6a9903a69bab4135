"""Where the topic of a dataset or stream is: in a folder, or in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from persisting import fs as filesystem
from persisting.errors import InvalidArgument
from persisting.options import local_path
from persisting.store.storage_options import StorageOptions
from persisting.store_address import is_store_address, parse
from persisting.table.store_table import StoreTable
from persisting.table.table import Table
from persisting.table.view import TableView
from persisting.topic.spec import bucket_folder, bucket_name
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_files import TopicFolder


class Place(msgspec.Struct, frozen=True):
    """A topic's folder, or its address. It pickles with its credentials, so that workers have them;
    ``repr`` and the states of streams do not show them."""

    path: str
    options: dict[str, Any] | None = None
    """The ``storage_options`` of a topic in an object store."""

    def __repr__(self) -> str:
        return f"Place({self.path!r})"

    def __str__(self) -> str:
        return self.path

    @property
    def is_in_store(self) -> bool:
        return is_store_address(self.path)

    def open(self) -> TopicFolder:
        """Open the topic for reading. Blocking."""
        if not self.is_in_store:
            return TopicFolder.open(Path(self.path))
        address = parse(self.path)
        return StoreTopic.find(address.name, str(address.parent), self.options)

    def view(self, bucket: int, version: int) -> TableView:
        """Return a version of a bucket's table; nothing else of the topic is read."""
        if not self.is_in_store:
            folder = bucket_folder(Path(self.path), bucket)
            return Table(folder, filesystem.current()).at(version)
        address = parse(self.path) / bucket_name(bucket)
        return StoreTable(address, StorageOptions(self.options)).at(version)


def place_of(path: Any, options: Mapping[str, Any] | None = None) -> Place:
    """Return the place of a topic, or raise."""
    if not isinstance(path, (str, Path)) or not str(path):
        raise InvalidArgument(f"path must be a topic's folder or address, got {path!r}")
    if is_store_address(path):
        address = parse(str(path))
        StorageOptions(options).for_scheme(address.scheme)  # raises for unknown settings
        return Place(str(address), None if options is None else dict(options))
    if options is not None:
        raise InvalidArgument(
            "storage_options are for topics in an object store: path='s3://bucket/prefix/topic', "
            "gs:// or az://"
        )
    return Place(str(local_path("path", path)))
