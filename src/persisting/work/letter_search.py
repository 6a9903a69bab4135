"""Finding the dead letters of a group in the topic that holds them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from persisting.topic.bucket_client import BucketClient, Topic
from persisting.topic.table_calls import MakeDurable, Query
from persisting.work.dead_letters import FIELD, letter_place
from persisting.work.open_records import NEVER

_PAGE_ROWS = 1000
_NUMBERS = ("number", "bucket", "offset", "generation")


async def find_letters(
    letters: Topic, group_id: str, where: str | None = None
) -> AsyncGenerator[list[tuple[int, dict[str, Any]]], None]:
    """Yield the dead letters of a group page by page, each with its place; only those that meet
    ``where``.

    ``group_id`` tells it from groups of the same name that were deleted before.
    """
    for bucket in range(letters.num_buckets):
        client = letters.bucket(bucket)
        if getattr(client, "may_be_behind", False):
            await client.call(MakeDurable(NEVER))
        matching: set[int] | None = None
        offset = 0
        while (page := await client.read(offset, _PAGE_ROWS)).rows:
            found = [
                (letter_place(bucket, position), record)
                for position, record in enumerate(page.rows, page.first)
                if is_letter_of(group_id, record)
            ]
            if found and where is not None:
                if matching is None:
                    matching = await _matching(client, group_id, where)
                found = [item for item in found if item[1][FIELD]["number"] in matching]
            yield found
            offset = page.first + len(page.rows)


async def _matching(client: BucketClient, group_id: str, where: str) -> set[int]:
    """Return the numbers of the dead letters in a bucket that meet a condition."""
    matches = await client.call(Query(where, [FIELD]))
    return {record[FIELD]["number"] for record in matches if is_letter_of(group_id, record)}


def is_letter_of(group_id: str, record: dict[str, Any]) -> bool:
    """Whether a record is a dead letter of a group: anything may be put into its topic."""
    letter = record.get(FIELD)
    return (
        isinstance(letter, dict)
        and letter.get("group_id") == group_id
        and all(isinstance(letter.get(name), int) for name in _NUMBERS)
        and isinstance(letter.get("history"), str)
    )
