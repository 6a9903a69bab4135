"""Finding the dead letters of a group in the topic that holds them."""

from __future__ import annotations

from typing import Any

from persisting.topic.bucket_client import Topic
from persisting.topic.table_calls import Query
from persisting.work.dead_letters import FIELD, letter_place

_PAGE_ROWS = 1000
_NUMBERS = ("number", "bucket", "offset", "generation")


async def find_letters(
    letters: Topic, group_id: str, where: str | None = None
) -> list[tuple[int, dict[str, Any]]]:
    """Return the dead letters of a group, each with its place; only those that meet ``where``.

    ``group_id`` tells it from groups of the same name that were deleted before.
    """
    found = []
    for bucket in range(letters.num_buckets):
        client = letters.bucket(bucket)
        matching: set[int] | None = None
        if where is not None:
            matches = await client.call(Query(where))
            matching = {
                record[FIELD]["number"] for record in matches if is_letter_of(group_id, record)
            }
        offset = 0
        while True:
            page = await client.read(offset, _PAGE_ROWS)
            for position, record in enumerate(page.rows, page.first):
                if not is_letter_of(group_id, record):
                    continue
                if matching is None or record[FIELD]["number"] in matching:
                    found.append((letter_place(bucket, position), record))
            offset = page.first + len(page.rows)
            if not page.rows:
                break
    return found


def is_letter_of(group_id: str, record: dict[str, Any]) -> bool:
    """Whether a record is a dead letter of a group: anything may be put into its topic."""
    letter = record.get(FIELD)
    return (
        isinstance(letter, dict)
        and letter.get("group_id") == group_id
        and all(isinstance(letter.get(name), int) for name in _NUMBERS)
        and isinstance(letter.get("history"), str)
    )
