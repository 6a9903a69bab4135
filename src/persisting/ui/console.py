"""What the screens share."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from persisting.concurrency.pool import in_thread
from persisting.errors import StorageError
from persisting.ui.guard import Guard
from persisting.ui.options import ConsoleOptions
from persisting.ui.owners import Owners
from persisting.ui.queries import QueryPool
from persisting.ui.sampler import Sampler
from persisting.ui.storage_view import TopicsView
from persisting.ui.tasks import Tasks


class ReadOnly(StorageError):
    """The console was started without permission to change anything."""


@dataclass
class Console:
    """The running console."""

    options: ConsoleOptions
    view: TopicsView
    sampler: Sampler
    queries: QueryPool
    tasks: Tasks
    guard: Guard
    owners: Owners
    tails: int = 0
    """Live tails that are open now."""

    @classmethod
    def of(cls, request: Request) -> Console:
        console: Console = request.app.state.console
        return console

    def check_changes_allowed(self) -> None:
        """Raise unless the console may change topics."""
        if not self.options.allow_changes:
            raise ReadOnly(
                "this console only reads; start it with 'persisting ui --allow-changes' to change "
                "topics"
            )

    async def refresh(self, topic: str) -> None:
        """Let the next pages show a change that was just made."""
        await in_thread(self.sampler.refresh, topic)


def topic_of(request: Request) -> str:
    """Return the topic that an address names."""
    name: str = request.path_params["topic"]
    return name
