"""Consumer groups: members, lag, and moving a group after a preview."""

from __future__ import annotations

import time

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from persisting.actions.group_reset import reset_offsets
from persisting.errors import InvalidArgument
from persisting.topic.group_admin import GroupProgress
from persisting.topic.group_control import control_of
from persisting.topic.inspect import groups_of, spans_of
from persisting.topic.topic_files import TopicFolder
from persisting.ui import pages
from persisting.ui.charts import line_chart
from persisting.ui.console import Console, topic_of
from persisting.ui.pages import number
from persisting.ui.requests import Parameters, address, written_positions
from persisting.ui.screens.records import check_bucket
from persisting.ui.series import KEPT_SECONDS
from persisting.ui.texts import Translator


async def show(request: Request) -> Response:
    """Show the groups of a topic."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    groups = await console.view.read(topic, groups_of)
    return pages.render(
        request,
        "groups.html",
        topic=topic,
        groups=groups,
        charts=_charts(console, topic, Translator(pages.language(request))),
        done=given.text("done", 200),
        redriven=given.optional_number("redriven"),
    )


def _charts(
    console: Console, topic: str, translate: Translator
) -> dict[str, list[tuple[str, Markup]]]:
    """Return, by group, titles and charts of its lag: of all buckets and of each."""
    sample = console.sampler.sample(topic)
    if sample is None:
        return {}
    history, now = sample.history, time.time()
    drawn: dict[str, list[tuple[str, Markup]]] = {}
    for group, series in list(history.lag.items()):
        named = [(translate("Lag of {group}", group=group), series)]
        for (name, bucket), part in sorted(history.bucket_lag.items(), key=lambda pair: pair[0]):
            if name == group:
                title = translate("Lag in bucket {bucket}", bucket=bucket)
                named.append((title, part))
        for title, lag in named:
            points = lag.points()
            since = max(now - KEPT_SECONDS, points[0].time if points else now)
            top = number(max((p.value for p in points), default=0))
            chart = line_chart(title, points, since, now, top)
            drawn.setdefault(group, []).append((title, chart))
    return drawn


async def preview(request: Request) -> Response:
    """Show what a reset would do."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    console.check_changes_allowed()
    group, where = given.required("group"), _where(given)
    bucket = given.optional_number("bucket")

    def plan(source: TopicFolder) -> tuple[GroupProgress, GroupProgress, dict[int, int]]:
        if bucket is not None:
            check_bucket(source, bucket)
        chosen = list(source.buckets) if bucket is None else [bucket]
        try:
            offsets = reset_offsets(source, spans_of(source), where, chosen)
        except ValueError as exc:
            raise InvalidArgument(str(exc)) from exc
        spans = lambda: spans_of(source)  # noqa: E731
        control = control_of(source)
        before = control.progress(group, source.buckets, spans)
        after = control.after_reset(group, offsets, source.buckets, spans)
        return before, after, offsets

    before, after, offsets = await console.view.read(topic, plan)
    return pages.render(
        request,
        "reset.html",
        topic=topic,
        group=group,
        where=where,
        rows=list(zip(before.buckets, after.buckets, strict=True)),
        before=before,
        after=after,
        offsets=written_positions(offsets),
    )


def _where(given: Parameters) -> str:
    chosen = given.choice("to", ("earliest", "latest", "offset", "time"))
    if chosen in ("earliest", "latest"):
        return chosen
    where = given.required("where")
    if chosen == "offset" and not where.isdecimal():
        raise InvalidArgument(f"an offset is a number, got {where!r}")
    return where


async def reset(request: Request) -> Response:
    """Move a group to the offsets of the preview."""
    console, topic = Console.of(request), topic_of(request)
    console.check_changes_allowed()
    given = await Parameters.of_form(request)
    group, offsets = given.required("group"), given.positions("offsets")

    def move(source: TopicFolder) -> None:
        for bucket in offsets or {}:
            check_bucket(source, bucket)
        spans = spans_of(source)
        for bucket, offset in (offsets or {}).items():
            if not spans[bucket].start <= offset <= spans[bucket].end:
                raise InvalidArgument(
                    f"offset {offset} of bucket {bucket} no longer exists; open the preview again"
                )
        # A preview is shown only for groups that exist.
        control = control_of(source)
        control.progress(group, source.buckets, lambda: spans)
        control.reset(group, offsets or {}, spans)

    await console.view.read(topic, move)
    await console.refresh(topic)
    back = address(f"/topics/{pages.segment(topic)}/groups", done=group)
    return RedirectResponse(back, status_code=303)
