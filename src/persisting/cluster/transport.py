"""What the cluster needs of a network: ask an endpoint, or stream replies from it.

An endpoint is a name on a node: its host, or one lane of a bucket. Everything but
:mod:`~persisting.cluster.pulsing_transport` and :mod:`~persisting.cluster.actor` uses the types
of this module only, so that another transport can stand beside Pulsing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from persisting.cluster.wire import Reply, Request

HOST_ENDPOINT = "persisting/host"
"""The endpoint of a node that owns buckets."""

ALIVE_ENDPOINT = "persisting/alive"
"""The endpoint of such a node that answers immediately, whatever the others do."""

PING_SECONDS = 2.0
"""How long a ping may take."""

KEEPALIVE_SECONDS = 5.0
"""The longest pause between two replies of a stream. The sender notices only by sending that its
consumer has ended, and a consumer treats a stream that is silent for three pauses as broken."""


class Unreachable(Exception):
    """A node did not answer, or its answer is not a reply."""


@dataclass(frozen=True)
class ReplyStream:
    """An answer that consists of many replies; its sender closes ``replies``."""

    kind: str
    replies: AsyncGenerator[Reply, None]


Answer: TypeAlias = "Reply | ReplyStream"
Answering: TypeAlias = "Callable[[Request], Awaitable[Answer]]"
StopHook: TypeAlias = "Callable[[], Awaitable[None]]"
Answered: TypeAlias = "Callable[[Reply | Exception], None]"
"""Called in the event loop with the reply to a request, which may carry an error, or with
:class:`Unreachable`."""


class RequestTarget(Protocol):
    """A way to ask one endpoint. Errors of Persisting arrive as the class they were raised as,
    every other failure as :class:`Unreachable`."""

    @property
    def node(self) -> str:
        """The id of the node that the endpoint is on."""

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        """Return the reply to a request."""


class PostingTarget:
    """A :class:`RequestTarget` that also sends without a task that waits for the reply: that saves
    two turns of the event loop. A plain base class, since every put looks for it."""

    node: str

    def post(self, request: Request, answered: Answered) -> bool:
        """Send a request now, and call ``answered`` later; False if it cannot be sent now."""
        raise NotImplementedError


class Connection(RequestTarget, Protocol):
    """A way to one endpoint that also streams."""

    def stream(self, request: Request) -> AsyncGenerator[Reply, None]:
        """Yield the replies to a request.

        The consumer stops at the reply that it knows to be the last; a stream that ends without
        one raises :class:`Unreachable`.
        """


class Transport(Protocol):
    """This node's way to the others."""

    @property
    def node(self) -> str:
        """The id of this node."""

    async def hosts(self) -> list[str]:
        """Return the nodes that own buckets and are alive, as far as the cluster knows."""

    async def connect(self, endpoint: str, node: str, timeout: float) -> Connection:
        """Return a connection to an endpoint of a node, or raise :class:`Unreachable`."""


class HostTransport(Transport, Protocol):
    """A transport that also lets other nodes reach this one."""

    @property
    def address(self) -> str:
        """The address that this node listens on."""

    async def publish(
        self, endpoint: str, answering: Answering, on_stop: StopHook | None = None
    ) -> None:
        """Answer the requests to an endpoint; ``on_stop`` runs when the endpoint stops."""

    async def withdraw(self, endpoint: str) -> None:
        """Stop answering at an endpoint; do nothing if it is not published."""
