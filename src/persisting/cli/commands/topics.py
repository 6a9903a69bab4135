"""``topics`` and ``describe``: show what is stored."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import click

from persisting.actions.text_values import format_size
from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.output import plural

if TYPE_CHECKING:
    from persisting.topic.inspect import Description, TopicFacts


_NODE_DIGITS = 8
"""Enough to tell nodes apart; --json has the whole id."""


def _owner(owner: dict[str, Any]) -> str:
    process = f"pid {owner.get('pid', '?')}@{owner.get('host', '?')}"
    if "node" not in owner:
        return process
    node = str(owner["node"])[:_NODE_DIGITS]
    return f"{process} (node {node} {owner.get('address', '')})".replace(" )", ")")


@click.command()
@parameters.storage
@parameters.as_json
@prints("topics", "persisting.topic.inspect:TopicFacts", many=True)
def topics(storage: str, as_json: bool) -> None:
    """List the topics with rows, size, buckets, owner and lag of their groups.

    \b
    Examples:
      persisting topics
      persisting topics -s /data/queues --json | jq '.[].topic'
    """
    from persisting.topic.inspect import topics_in

    found = topics_in(storage)
    output.show(found, as_json, lambda: _print_topics(found, storage))


def _print_topics(found: list[TopicFacts], storage: str) -> None:
    if not found:
        output.say(f"no topics in {storage}")
        return
    names = ["topic", "#rows", "#size", "#log", "#buckets", "backend", "owner", "lag", "problem"]
    shown = len(names) if any(topic.problem for topic in found) else len(names) - 1
    output.table(
        names[:shown],
        [
            [
                topic.topic,
                topic.rows,
                format_size(topic.bytes),
                format_size(topic.log_bytes),
                topic.num_buckets,
                topic.backend,
                ", ".join(map(_owner, topic.owners)) or "-",
                ", ".join(f"{name} {lag:,}" for name, lag in topic.lag.items()) or "-",
                topic.problem,
            ][:shown]
            for topic in found
        ],
    )


@click.command()
@parameters.topic
@parameters.storage
@parameters.as_json
@prints("describe", "persisting.topic.inspect:Description")
def describe(topic: str, storage: str, as_json: bool) -> None:
    """Show everything about a topic: fields, buckets, versions, indexes, groups, log.

    \b
    Examples:
      persisting describe events
      persisting describe /data/queues/events --json
    """
    from persisting.topic.inspect import describe as description_of

    found = description_of(topics_access.find_topic(topic, storage))
    output.show(found, as_json, lambda: _print_description(found))


def _print_description(found: Description) -> None:
    output.facts(
        [
            ("topic", found.topic),
            ("path", found.path),
            ("backend", found.backend),
            ("rows", f"{found.rows:,}"),
            ("size", format_size(found.bytes)),
            ("buckets", f"{found.num_buckets} by {found.bucket_column!r}"),
            ("page", f"{found.batch_size} rows"),
            ("options", ", ".join(f"{k}={v!r}" for k, v in found.options.items()) or "defaults"),
            ("versions", found.versions),
        ]
    )
    _print_section(
        "fields", ["field", "type"], [[field.name, field.type] for field in found.fields]
    )
    _print_section(
        "buckets",
        ["#bucket", "#rows", "#from", "#to", "#version", "#fragments", "#size", "owner", "problem"],
        [
            [
                bucket.bucket,
                bucket.rows,
                bucket.start_offset,
                bucket.end_offset,
                bucket.version,
                bucket.fragments,
                format_size(bucket.bytes),
                "-" if bucket.owner is None else _owner(bucket.owner),
                bucket.problem,
            ]
            for bucket in found.buckets
        ],
    )
    _print_section(
        "tags",
        ["tag", "time", "#rows"],
        [
            [tag.name, output.local_time(dt.datetime.fromisoformat(tag.timestamp)), tag.rows]
            for tag in found.tags
        ],
    )
    _print_section(
        "indexes",
        ["field", "kind", "metric", "buckets"],
        [
            [index.column, index.kind, index.metric, ", ".join(map(str, index.buckets))]
            for index in found.indexes
        ],
    )
    _print_section(
        "groups",
        ["group", "#members", "#lag"],
        [[group.group, group.members, group.lag] for group in found.groups],
    )
    _print_section(
        "log",
        ["#bucket", "state", "#size", "#segments", "#frames to flush", "problem"],
        [
            [
                log.bucket,
                log.state,
                format_size(log.bytes),
                log.segments,
                log.pending_frames,
                log.problem,
            ]
            for log in found.logs
            if log.state != "empty"
        ],
    )


def _print_section(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    if rows:
        output.line()
        output.heading(f"{title} ({plural(len(rows), 'entry', 'entries')})")
        output.table(columns, rows)
