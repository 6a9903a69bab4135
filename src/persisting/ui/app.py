"""The web application: its routes, and how errors become pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from persisting.concurrency.pool import in_thread
from persisting.errors import (
    BucketLocked,
    InvalidArgument,
    NoSuchTopic,
    OffsetOutOfRange,
    StorageError,
)
from persisting.ui import pages
from persisting.ui.console import Console, ReadOnly
from persisting.ui.guard import SIGN_IN, Guard
from persisting.ui.options import ConsoleOptions
from persisting.ui.owners import Owners
from persisting.ui.queries import QueryPool, QueryStopped, ReaderLeft
from persisting.ui.requests import Parameters
from persisting.ui.sampler import Sampler
from persisting.ui.screens import (
    dead_letters,
    groups,
    maintenance,
    records,
    search,
    tail,
    topic,
    topics,
    trajectories,
    versions,
)
from persisting.ui.store_view import view_of
from persisting.ui.tasks import Tasks
from persisting.ui.texts import LANGUAGES

if TYPE_CHECKING:
    from persisting.cluster.cluster_reader import ClusterReader

_STATIC = Path(__file__).parent / "static"
_LEFT = 499
_STATUS = {
    NoSuchTopic: 404,
    OffsetOutOfRange: 404,
    InvalidArgument: 400,
    ReadOnly: 403,
    BucketLocked: 409,
    QueryStopped: 503,
}


def create_app(options: ConsoleOptions, cluster: ClusterReader | None = None) -> ASGIApp:
    """Return the console as an ASGI application; with a cluster, its owners are asked too."""
    app = Starlette(
        routes=routes(),
        lifespan=_lifespan,
        exception_handlers={
            StorageError: _failed,
            OSError: _failed,
            HTTPException: _not_found,
            ReaderLeft: _left,
            Exception: _broken,
        },
    )
    guard = Guard(app, options)
    view = view_of(options.storage)
    owners = Owners(view, cluster)
    app.state.console = Console(
        options,
        view,
        Sampler(view, options.sample_seconds or view.sample_seconds, owners.buckets_now),
        QueryPool(options.query_seconds, options.query_memory),
        Tasks(),
        guard,
        owners,
    )
    return guard


def routes() -> list[Any]:
    """Return the addresses of the console."""
    here = "/topics/{topic}"
    return [
        Route("/", topics.show),
        Route(here, topic.show),
        Route(f"{here}/records", records.browse),
        Route(f"{here}/records/{{bucket}}/{{offset}}", records.show),
        Route(f"{here}/records/{{bucket}}/{{offset}}/json", records.as_json),
        Route(f"{here}/records/{{bucket}}/{{offset}}/image", records.image),
        Route(f"{here}/download", records.download),
        Route(f"{here}/tail", tail.show),
        Route(f"{here}/tail/events", tail.events),
        Route(f"{here}/search", search.show),
        Route(f"{here}/trajectories", trajectories.show),
        Route(f"{here}/trajectories/run", trajectories.run),
        Route(f"{here}/groups", groups.show),
        Route(f"{here}/groups/reset", groups.preview),
        Route(f"{here}/groups/reset", groups.reset, methods=["POST"]),
        Route(f"{here}/groups/redrive", dead_letters.preview),
        Route(f"{here}/groups/redrive", dead_letters.redrive, methods=["POST"]),
        Route(f"{here}/versions", versions.show),
        Route(f"{here}/versions/compare", versions.compare),
        Route(f"{here}/versions/tags", versions.create_tag, methods=["POST"]),
        Route(f"{here}/versions/tags/delete", versions.delete_tag, methods=["POST"]),
        Route(f"{here}/versions/restore", versions.preview_restore),
        Route(f"{here}/versions/restore", versions.restore, methods=["POST"]),
        Route(f"{here}/maintenance", maintenance.show),
        Route(f"{here}/maintenance/retain", maintenance.preview_retention),
        Route(f"{here}/maintenance/{{kind}}", maintenance.start, methods=["POST"]),
        Route(f"{here}/tasks/{{number}}/stop", maintenance.stop, methods=["POST"]),
        Route(SIGN_IN, _sign_in_page),
        Route(SIGN_IN, _sign_in, methods=["POST"]),
        Route("/language/{language}", _choose_language, methods=["POST"]),
        Mount("/static", StaticFiles(directory=_STATIC)),
    ]


_FIRST_PAGE_SECONDS = 2.0
"""How long after the start the first page is likely to be asked for."""


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    console: Console = app.state.console
    await in_thread(_prepare)
    console.owners.start()
    console.sampler.start()
    prepared = asyncio.create_task(_prepare_queries(console))
    try:
        yield
    finally:
        prepared.cancel()
        await console.tasks.close()
        await console.queries.close()
        await in_thread(console.sampler.stop)


async def _prepare_queries(console: Console) -> None:
    """Start a process for queries when the first page is likely to be shown: starting it takes the
    processor for a second."""
    await asyncio.sleep(_FIRST_PAGE_SECONDS)
    await console.queries.prepare()


def _prepare() -> None:
    """Load what the first requests need, so that they do not wait for it."""
    import lance  # noqa: F401 (the tables import it when they are first opened)

    import persisting.local_socket.open_shared  # noqa: F401 (as read_queue does)

    pages.compile_all()


async def _failed(request: Request, exc: Exception) -> Response:
    status = next((code for cls, code in _STATUS.items() if isinstance(exc, cls)), 500)
    return pages.render(request, "error.html", status=status, message=str(exc), code=status)


async def _broken(request: Request, exc: Exception) -> Response:
    """Show a page for an error of the console itself; the server prints its traceback."""
    message = f"the console failed ({type(exc).__name__}); its own output says where"
    return pages.render(request, "error.html", status=500, message=message, code=500)


async def _left(request: Request, exc: Exception) -> Response:
    return Response(status_code=_LEFT)  # it reaches nobody


async def _not_found(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return pages.render(
        request, "error.html", status=exc.status_code, message=exc.detail, code=exc.status_code
    )


async def _sign_in_page(request: Request) -> Response:
    return pages.render(request, "sign_in.html", wrong=False)


async def _sign_in(request: Request) -> Response:
    guard = Console.of(request).guard
    if not guard.is_token((await Parameters.of_form(request)).text("token")):
        await asyncio.sleep(0.5)
        return pages.render(request, "sign_in.html", status=401, wrong=True)
    response = RedirectResponse("/", status_code=303)
    guard.remember(response)
    return response


async def _choose_language(request: Request) -> Response:
    language = request.path_params["language"]
    if language not in LANGUAGES:
        raise HTTPException(404)
    back = (await Parameters.of_form(request)).text("back") or "/"
    if not back.startswith("/") or back.startswith(("//", "/\\")):
        back = "/"
    response = RedirectResponse(back, status_code=303)
    response.set_cookie(
        pages.LANGUAGE_COOKIE, language, max_age=365 * 86400, httponly=True, samesite="lax"
    )
    return response
