"""Decides which requests the console answers, and adds the headers that restrict browsers.

Three attacks are refused. A page of another site whose name resolves to this machine (DNS
rebinding) sends its own name as the host. A form of another site sends its own origin. And without
the token nobody reads a console that other machines can reach.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from persisting.ui.options import ConsoleOptions

SIGN_IN = "/sign-in"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "clipboard-write=(self)",
}
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_STATIC = "/static/"
_OPEN_PATHS = (_STATIC, "/language/", SIGN_IN)
_READING = ("GET", "HEAD")


class Guard:
    """ASGI middleware that checks host, origin and token."""

    def __init__(self, app: ASGIApp, options: ConsoleOptions) -> None:
        self._app, self._token = app, options.token
        self._names = {options.host.strip("[]").lower(), *map(str.lower, options.allowed_hosts)}
        self._any_address = not options.is_loopback
        if options.is_loopback:
            self._names |= _LOOPBACK_NAMES
        else:
            self._names.add(socket.gethostname().lower())
        self.cookie = f"persisting_{options.port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # the console has no web sockets; the server closes the connection

        started = time.perf_counter()

        async def send_restricted(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                took = (time.perf_counter() - started) * 1000
                headers["Server-Timing"] = f"total;dur={took:.1f}"
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                # Browsers keep scripts and styles, and ask whether they are still the same.
                is_static = scope["path"].startswith(_STATIC)
                headers.setdefault("Cache-Control", "no-cache" if is_static else "no-store")
            await send(message)

        answer = self._answer(scope)
        await (answer or self._app)(scope, receive, send_restricted)

    def _answer(self, scope: Scope) -> Response | None:
        """Return the refusal of a request, or None if the console may answer it."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self.is_known_host(host):
            return _refuse(
                421,
                f"The console does not answer for the host {host!r}. Open it under its own "
                "address, or start it with --allow-host NAME.",
            )
        if not _is_same_site(scope["method"], headers, host):
            return _refuse(403, "The request came from a page of another site and was refused.")
        if scope["path"].startswith(_OPEN_PATHS) or self.is_signed_in(headers):
            return None
        return self._signed_in(scope) or RedirectResponse(SIGN_IN, status_code=303)

    def is_known_host(self, host: str) -> bool:
        """Return whether a Host header names the console."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        if not self._any_address:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def is_signed_in(self, headers: Headers) -> bool:
        """Return whether a request may see what the console shows."""
        return self._token is None or self.is_token(_cookie(headers, self.cookie))

    def is_token(self, given: str | None) -> bool:
        """Return whether a text is the token, in the same time wherever they differ."""
        if self._token is None or given is None:
            return False
        return hmac.compare_digest(given.encode(), self._token.encode())

    def remember(self, response: Response) -> None:
        """Let a browser keep the token as a cookie that scripts cannot read."""
        assert self._token is not None
        response.set_cookie(
            self.cookie, self._token, max_age=7 * 86400, httponly=True, samesite="lax"
        )

    def _signed_in(self, scope: Scope) -> Response | None:
        """Accept the token of an address, and redirect to the address without it."""
        if scope["method"] not in _READING:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not self.is_token(dict(query).get("token")):
            return None
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        path = "/" + scope["path"].lstrip("/")
        response = RedirectResponse(f"{path}?{rest}" if rest else path, status_code=303)
        self.remember(response)
        return response


def _is_same_site(method: str, headers: Headers, host: str) -> bool:
    """Return whether a request comes from the console's own pages, or only follows a link.

    Browsers send Origin with every form. Programs that send neither header are not browsers, so no
    other site can make them ask.
    """
    site = headers.get("sec-fetch-site")
    if method in _READING:
        # A frame navigates too, but a page of another site that embeds this one follows no link.
        follows_link = headers.get("sec-fetch-mode") == "navigate"
        in_window = headers.get("sec-fetch-dest", "document") == "document"
        return site in (None, "same-origin", "none") or (follows_link and in_window)
    origin = headers.get("origin")
    if origin is not None:
        return origin in (f"http://{host}", f"https://{host}")
    return site in (None, "same-origin")


def _cookie(headers: Headers, name: str) -> str | None:
    """Return a cookie; those of other programs on this machine may have any form."""
    return cookie_parser(headers.get("cookie", "")).get(name)


def _refuse(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)
