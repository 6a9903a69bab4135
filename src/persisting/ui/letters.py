"""Dead letters of a work group, read as they are stored: the group is not joined, and nothing is
written. Blocking."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from persisting.errors import NoSuchTopic
from persisting.table.search import check_where, enclosed
from persisting.topic.topic_files import TopicFolder
from persisting.ui.matches import searches
from persisting.ui.queries import DeadLetters, LetterRow
from persisting.ui.storage_view import TopicsView
from persisting.ui.value_trees import brief
from persisting.work.dead_letters import FIELD, SUFFIX
from persisting.work.group_place import check_group
from persisting.work.group_values import Letter
from persisting.work.letter_search import is_letter_of
from persisting.work.state import GroupState

_TAKEN = 64
"""Letters read at a time."""
_CUT = 200


def group_state(topic: TopicFolder, group: str) -> GroupState:
    """Return the state of a work group as its journal holds it; raise if there is none."""
    return check_group(topic, group).read_state(group)


def find_letters(
    view: TopicsView, topic: TopicFolder, group: str, where: str | None, most: int
) -> DeadLetters:
    """Return the first dead letters of a group that can be re-driven and meet a condition."""
    check_where(where)
    state = group_state(topic, group)
    identity = state.settings.identity
    try:
        found = view.read_now(
            topic.config.topic + SUFFIX,
            lambda letters: list(islice(_open_letters(letters, state, where), most + 1)),
        )
    except NoSuchTopic:
        found = []
    return DeadLetters(identity, found[:most], len(found) > most)


def _open_letters(
    letters: TopicFolder, state: GroupState, where: str | None
) -> Iterator[LetterRow]:
    """Yield the dead letters that were not re-driven yet."""
    identity = state.settings.identity
    mine = f"{FIELD}.group_id = '{identity}'"
    condition = mine if where is None else f"{enclosed(where)} AND {mine}"
    for _, snapshot, search in searches(letters):
        if FIELD not in snapshot.schema.names:
            continue
        offsets = search.matching_offsets(condition, None)
        for first in range(0, len(offsets), _TAKEN):
            for record in snapshot.take(offsets[first : first + _TAKEN]):
                if is_letter_of(identity, record) and _can_redrive(state, record[FIELD]):
                    yield _described(record)


def _can_redrive(state: GroupState, origin: dict[str, Any]) -> bool:
    letter = Letter(
        number=origin["number"],
        place=0,  # decides nothing here
        bucket=origin["bucket"],
        offset=origin["offset"],
        generation=origin["generation"],
    )
    return state.can_redrive(letter)


def _described(letter: dict[str, Any]) -> LetterRow:
    """Return what a page shows of a dead letter."""
    origin = letter[FIELD]
    record = {name: value for name, value in letter.items() if name != FIELD and value is not None}
    time = origin.get("time")
    return LetterRow(
        number=origin["number"],
        bucket=origin["bucket"],
        offset=origin["offset"],
        attempts=origin.get("attempts") or 0,
        time=None if time is None else time.isoformat(),
        reason=brief(origin.get("reason"), _CUT),
        record=brief(record, _CUT),
    )
