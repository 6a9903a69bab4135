"""The list of topics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from persisting.concurrency.pool import in_thread
from persisting.ui import pages
from persisting.ui.charts import sparkline
from persisting.ui.console import Console
from persisting.ui.requests import Parameters
from persisting.ui.sampler import TopicSample

_PAGE = 100
SORTS = ("topic", "rows", "size", "rate", "lag", "problem")


@dataclass
class TopicRow:
    """A topic in the list; one that no round has seen yet has only a name."""

    topic: str
    sample: TopicSample | None

    @property
    def spark(self) -> Markup:
        if self.sample is None:
            return Markup("")
        since = self.sample.time - 60
        return sparkline(self.sample.history.records.rates(since), since, self.sample.time)


async def show(request: Request) -> Response:
    """Show a page of the topics."""
    console, given = Console.of(request), Parameters.of(request)
    sort, order = given.choice("sort", SORTS), given.choice("order", ("asc", "desc"))
    contains, page = given.text("filter", 200) or "", given.number("page", 1, least=1)
    samples = console.sampler.samples()
    names = console.sampler.names()
    if names is None:
        names = await in_thread(console.view.names)
    rows = [
        TopicRow(name, samples.get(name))
        for name in names
        if contains.casefold() in name.casefold()
    ]
    rows.sort(key=lambda row: _key(row, sort), reverse=order == "desc")
    last_page = max(1, -(-len(rows) // _PAGE))
    page = min(page, last_page)
    shown = rows[(page - 1) * _PAGE : page * _PAGE]
    return pages.render(
        request,
        "topics.html",
        rows=shown,
        is_complete=all(row.sample is not None for row in shown),
        found=len(rows),
        total=len(names),
        contains=contains,
        sort=sort,
        order=order,
        sorts=SORTS,
        page=page,
        last_page=last_page,
    )


def _key(row: TopicRow, sort: str) -> Any:
    sample = row.sample
    if sort == "topic" or sample is None:
        return (0, row.topic) if sort == "topic" else (-1, row.topic)
    if sort == "problem":
        return int(sample.problem is not None), row.topic
    values = {
        "rows": sample.rows,
        "size": sample.bytes,
        "rate": sample.rate,
        "lag": sample.lag,
    }
    return values[sort], row.topic
