"""All commands by section, with their first sentences: the help needs none of their modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import NamedTuple

import click


class Entry(NamedTuple):
    """Where a command is defined, and the first sentence of its help."""

    path: str
    """``module:name`` within persisting.cli.commands."""
    summary: str


SECTIONS: dict[str, dict[str, Entry]] = {
    "Inspect": {
        "topics": Entry(
            "topics:topics",
            "List the topics with rows, size, buckets, owner and lag of their groups.",
        ),
        "describe": Entry(
            "topics:describe",
            "Show everything about a topic: fields, buckets, versions, indexes, groups, log.",
        ),
        "head": Entry("read:head", "Show the oldest records, in order of arrival."),
        "tail": Entry(
            "read:tail", "Show the newest records, in order of arrival; follow the topic with -f."
        ),
        "get": Entry(
            "read:get", "Show the records from an offset on, of one bucket or of every bucket."
        ),
        "ui": Entry(
            "ui:ui",
            "Serve a web page that shows topics: records, live tail, search, trajectories, "
            "versions.",
        ),
        "count": Entry(
            "search:count", "Count the records of a topic, or those that match an SQL condition."
        ),
    },
    "Search": {
        "search": Entry(
            "search:search",
            "Find the records nearest to a vector, best matching some words, or both.",
        ),
        "query": Entry(
            "search:query",
            "Show the records that match an SQL condition, in order within each bucket.",
        ),
        "index": Entry(
            "index:index",
            "Create, list and drop the indexes that make searches and lookups fast.",
        ),
    },
    "Write and export": {
        "create": Entry(
            "lifecycle:create",
            "Create an empty topic; by default every acknowledged record survives a power failure.",
        ),
        "put": Entry("write:put", "Store JSON lines from a pipe or a file durably in a topic."),
        "import": Entry(
            "write:import_",
            "Store the rows of Parquet, Lance, JSON lines, CSV or TSV files in a topic.",
        ),
        "export": Entry(
            "export:export", "Write the records of a topic to a file: Parquet, Lance or JSON lines."
        ),
        "delete": Entry(
            "lifecycle:delete",
            "Delete a topic with its records, versions, tags and consumer groups for good.",
        ),
    },
    "Versions": {
        "tag": Entry(
            "versions:tag",
            "Tag the current state of a topic with a name; without a name, list the tags.",
        ),
        "versions": Entry(
            "versions:versions", "List the readable versions of the buckets, oldest first."
        ),
        "restore": Entry(
            "versions:restore", "Restore a topic to a tag, a point in time or given versions."
        ),
    },
    "Consumer groups": {
        "groups": Entry(
            "groups:groups", "Show consumer groups and their lag; reset or delete a group."
        ),
        "work": Entry(
            "work:work",
            "Release leases of a work group; list, show and re-drive its dead letters.",
        ),
    },
    "Maintenance": {
        "compact": Entry(
            "maintenance:compact",
            "Merge small fragments into larger ones; offsets, order and content do not change.",
        ),
        "retain": Entry(
            "maintenance:retain",
            "Drop the oldest records beyond a limit, in whole fragments; offsets do not change.",
        ),
        "verify": Entry(
            "maintenance:verify",
            "Compare every stored file with its checksum, check order and logs; exit with 5 on "
            "damage.",
        ),
        "backup": Entry(
            "backup:backup",
            "Copy a topic while it is written, check the copy, restore it as a topic.",
        ),
        "wal": Entry("wal:wal", "Inspect the write-ahead log and cut off damage."),
        "metrics": Entry("metrics:metrics", "Export the state of topics to Prometheus."),
    },
    "Cluster": {
        "serve": Entry(
            "serve:serve",
            "Run a storage node of a Pulsing cluster, which owns buckets until SIGTERM or Ctrl-C.",
        ),
    },
    "Spark jobs": {
        "pipeline": Entry(
            "pipeline:pipeline", "Run Spark jobs on whole topics, locally or on a cluster."
        ),
    },
    "Demo and benchmark": {
        "demo": Entry(
            "demo:demo",
            "Show in two minutes what Persisting does: producers, a kill -9, recovery, Spark, "
            "search.",
        ),
        "bench": Entry(
            "bench:bench",
            "Measure durable puts and reads, compared with the sync rate of the disk.",
        ),
    },
    "Scripts and shells": {
        "json-schema": Entry(
            "schemas:json_schema", "Print the JSON Schema of the --json output of a command."
        ),
        "completion": Entry(
            "schemas:completion", "Print the script that completes commands and options in a shell."
        ),
    },
}


class LazyCommands(MutableMapping[str, click.Command]):
    """Commands by name, each imported when it is first asked for."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            module, attribute = self._entries[name].path.split(":")
            found = getattr(import_module(f"persisting.cli.commands.{module}"), attribute)
            self._loaded[name] = found
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._entries[name] = Entry("", command.get_short_help_str())
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._loaded.pop(name, None)


def all_commands() -> LazyCommands:
    """Return every command of the program."""
    return LazyCommands({name: entry for part in SECTIONS.values() for name, entry in part.items()})
