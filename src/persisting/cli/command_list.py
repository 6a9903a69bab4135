"""All commands by section, with their first sentences: the help needs none of their modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import NamedTuple

import click


class CommandEntry(NamedTuple):
    """Where a command is defined, and the first sentence of its help."""

    path: str
    """``module:name`` within persisting.cli.commands."""
    summary: str


SECTIONS: dict[str, dict[str, CommandEntry]] = {
    "Inspect": {
        "topics": CommandEntry(
            "topics:topics",
            "List the topics with rows, size, buckets, owner and lag of their groups.",
        ),
        "describe": CommandEntry(
            "topics:describe",
            "Show everything about a topic: fields, buckets, versions, indexes, groups, log.",
        ),
        "head": CommandEntry("read:head", "Show the oldest records, in order of arrival."),
        "tail": CommandEntry(
            "read:tail", "Show the newest records, in order of arrival; follow the topic with -f."
        ),
        "get": CommandEntry(
            "read:get", "Show the records from an offset on, of one bucket or of every bucket."
        ),
        "ui": CommandEntry(
            "ui:ui",
            "Serve a web page that shows topics: records, live tail, search, trajectories, "
            "versions.",
        ),
        "count": CommandEntry(
            "search:count", "Count the records of a topic, or those that match an SQL condition."
        ),
    },
    "Search": {
        "search": CommandEntry(
            "search:search",
            "Find the records nearest to a vector, best matching some words, or both.",
        ),
        "query": CommandEntry(
            "search:query",
            "Show the records that match an SQL condition, in order within each bucket.",
        ),
        "index": CommandEntry(
            "index:index",
            "Create, list and drop the indexes that make searches and lookups fast.",
        ),
    },
    "Write and export": {
        "create": CommandEntry(
            "lifecycle:create",
            "Create an empty topic; by default every acknowledged record survives a power failure.",
        ),
        "put": CommandEntry(
            "write:put", "Store JSON lines from a pipe or a file durably in a topic."
        ),
        "import": CommandEntry(
            "write:import_",
            "Store the rows of Parquet, Lance, JSON lines, CSV or TSV files in a topic.",
        ),
        "export": CommandEntry(
            "export:export", "Write the records of a topic to a file: Parquet, Lance or JSON lines."
        ),
        "delete": CommandEntry(
            "lifecycle:delete",
            "Delete a topic with its records, versions, tags and consumer groups for good.",
        ),
    },
    "Versions": {
        "tag": CommandEntry(
            "versions:tag",
            "Tag the current state of a topic with a name; without a name, list the tags.",
        ),
        "versions": CommandEntry(
            "versions:versions", "List the readable versions of the buckets, oldest first."
        ),
        "restore": CommandEntry(
            "versions:restore", "Restore a topic to a tag, a point in time or given versions."
        ),
    },
    "Consumer groups": {
        "groups": CommandEntry(
            "groups:groups", "Show consumer groups and their lag; reset or delete a group."
        ),
        "work": CommandEntry(
            "work:work",
            "Release leases of a work group; list, show and re-drive its dead letters.",
        ),
    },
    "Maintenance": {
        "compact": CommandEntry(
            "maintenance:compact",
            "Merge small fragments into larger ones; offsets, order and content do not change.",
        ),
        "retain": CommandEntry(
            "maintenance:retain",
            "Drop the oldest records beyond a limit, in whole fragments; offsets do not change.",
        ),
        "verify": CommandEntry(
            "maintenance:verify",
            "Compare every stored file with its checksum, check order and logs; exit with 5 on "
            "damage.",
        ),
        "backup": CommandEntry(
            "backup:backup",
            "Copy a topic while it is written, check the copy, restore it as a topic.",
        ),
        "wal": CommandEntry("wal:wal", "Inspect the write-ahead log and cut off damage."),
        "metrics": CommandEntry("metrics:metrics", "Export the state of topics to Prometheus."),
    },
    "Cluster": {
        "serve": CommandEntry(
            "serve:serve",
            "Run a storage node of a Pulsing cluster, which owns buckets until SIGTERM or Ctrl-C.",
        ),
    },
    "Spark jobs": {
        "pipeline": CommandEntry(
            "pipeline:pipeline", "Run Spark jobs on whole topics, locally or on a cluster."
        ),
    },
    "Demo and benchmark": {
        "demo": CommandEntry(
            "demo:demo",
            "Show in two minutes what Persisting does: producers, a kill -9, recovery, Spark, "
            "search.",
        ),
        "bench": CommandEntry(
            "bench:bench",
            "Measure durable puts and reads, compared with the sync rate of the disk.",
        ),
    },
    "Scripts and shells": {
        "json-schema": CommandEntry(
            "schemas:json_schema", "Print the JSON Schema of the --json output of a command."
        ),
        "completion": CommandEntry(
            "schemas:completion", "Print the script that completes commands and options in a shell."
        ),
    },
}


class LazyCommands(MutableMapping[str, click.Command]):
    """Commands by name, each imported when it is first asked for."""

    def __init__(self, entries: Mapping[str, CommandEntry]) -> None:
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
        self._entries[name] = CommandEntry("", command.get_short_help_str())
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._loaded.pop(name, None)


def all_commands() -> LazyCommands:
    """Return every command of the program."""
    return LazyCommands({name: entry for part in SECTIONS.values() for name, entry in part.items()})
