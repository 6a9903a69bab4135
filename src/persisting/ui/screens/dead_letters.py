"""Dead letters of work groups: what would be delivered again, and doing it."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from persisting.errors import InvalidArgument
from persisting.topic.topic_files import TopicFolder
from persisting.ui import pages
from persisting.ui.console import Console, topic_of
from persisting.ui.letters import group_state
from persisting.ui.queries import DeadLetters, DeadLettersQuery, unless_left
from persisting.ui.requests import Parameters, address
from persisting.work.dead_letters import FIELD

_MOST = 1_000
"""At most this many dead letters are delivered again at a time."""
_SHOWN = 50
_MAX_NUMBERS = 40_000
"""Characters of the numbers in a form."""


async def preview(request: Request) -> Response:
    """Show the dead letters that would be delivered again; reads files only."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    console.check_changes_allowed()
    group, where = given.required("group"), given.text("where")
    storage = console.view.place
    query = DeadLettersQuery(storage, topic, group, where, _MOST)
    found = await unless_left(request, console.queries.run(query, DeadLetters))
    return pages.render(
        request,
        "redrive.html",
        topic=topic,
        group=group,
        where=where,
        letters=found.letters[:_SHOWN],
        count=len(found.letters),
        is_cut=found.is_cut,
        numbers=written_numbers(letter.number for letter in found.letters),
        identity=found.identity,
        most=_SHOWN,
    )


async def redrive(request: Request) -> Response:
    """Deliver the dead letters of a preview to their group again."""
    console, topic = Console.of(request), topic_of(request)
    console.check_changes_allowed()
    given = await Parameters.of_form(request)
    group, identity = given.required("group"), given.required("identity")
    chosen = numbers_of(given.text("numbers", _MAX_NUMBERS) or "")

    def check(source: TopicFolder) -> None:
        if group_state(source, group).settings.identity != identity:
            raise InvalidArgument(
                f"group {group!r} was created again since the preview; open the preview again"
            )

    await console.view.read(topic, check)
    # The condition keeps all other dead letters out of memory.
    listed = ", ".join(map(str, sorted(chosen)))
    async with await console.owners.open_work(topic, group) as member:
        count = await member.redrive(f"{FIELD}.number IN ({listed})", numbers=chosen)
    await console.look_again(topic)
    back = address(f"/topics/{pages.segment(topic)}/groups", redriven=count)
    return RedirectResponse(back, status_code=303)


def written_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as :func:`numbers_of` reads them: ``1-5,9``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def numbers_of(text: str) -> set[int]:
    """Return the numbers of dead letters that a form names, or raise if it names none."""
    spans = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = Parameters({"numbers": first}), Parameters({"numbers": last if dash else first})
        low, high = (end.optional_number("numbers") for end in ends)
        if low is None or high is None or low > high:
            raise InvalidArgument("numbers must name dead letters, as in 1-5,9")
        spans.append((low, high))
    if sum(high - low + 1 for low, high in spans) > _MOST:
        raise InvalidArgument(f"at most {_MOST:,} dead letters are delivered again at a time")
    return {number for low, high in spans for number in range(low, high + 1)}
