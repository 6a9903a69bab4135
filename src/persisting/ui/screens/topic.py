"""One topic: facts, buckets, fields, and charts of the last hour."""

from __future__ import annotations

import time

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from persisting.actions.text_values import format_size
from persisting.concurrency.pool import in_thread
from persisting.errors import StorageError
from persisting.ui import pages
from persisting.ui.charts import line_chart
from persisting.ui.console import Console, topic_of
from persisting.ui.pages import number
from persisting.ui.sampler import TopicSample
from persisting.ui.series import KEPT_SECONDS, Point
from persisting.ui.texts import Translator


async def show(request: Request) -> Response:
    """Show what can be known about a topic from outside, as the sampler saw it last."""
    console, topic = Console.of(request), topic_of(request)
    await in_thread(console.view.check, topic)  # raises NoSuchTopic
    sample = console.sampler.sample(topic)
    if sample is None:
        sample = await in_thread(console.sampler.refresh, topic)
    if sample.description is None:
        raise StorageError(sample.problem or "the topic cannot be read")
    return pages.render(
        request,
        "topic.html",
        topic=topic,
        found=sample.description,
        unflushed=sample.unflushed,
        logs={log.bucket: log for log in sample.description.logs},
        charts=await in_thread(charts, Translator(pages.language(request)), sample),
        sample=sample,
    )


def charts(translate: Translator, sample: TopicSample) -> list[tuple[str, Markup]]:
    """Return the charts of the last hour with their titles."""
    history, now = sample.history, time.time()
    since = max(now - KEPT_SECONDS, min((p.time for p in history.records.points()), default=now))

    def drawn(title: str, points: list[Point], unit: str) -> tuple[str, Markup]:
        top = max((point.value for point in points), default=0.0)
        shown = format_size(top) if unit == "bytes" else f"{number(round(top, 1))}{unit}"
        return title, line_chart(title, points, since, now, shown)

    drawings = [
        drawn(translate("Put rate"), history.records.rates(), translate(" records/s")),
        drawn(translate("Records not flushed"), history.unflushed.points(), ""),
        drawn(translate("Size on disk"), history.size.points(), "bytes"),
    ]
    flush_time = [Point(p.time, p.value * 1000) for p in history.flush_time.points()]
    if flush_time:
        drawings.append(drawn(translate("Flush time"), flush_time, " ms"))
    for group, series in sorted(history.lag.items(), key=lambda pair: pair[0]):
        drawings.append(drawn(translate("Lag of {group}", group=group), series.points(), ""))
    return drawings
