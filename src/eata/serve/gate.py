"""What stands before every endpoint: the token, limits on bodies, and the count of what was answered."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eata.serve.metrics import Metrics
from eata.serve.refusal import Refusal

OPEN = ("/v2/health/live", "/v2/health/ready")
ADMIN = ("/v1/adaptation/freeze", "/v1/adaptation/resume", "/v1/adaptation/reset", "/v1/adaptation/rollback")
AT_ONCE = 16  # bodies of full size that may be held at once
CHALLENGE = {"WWW-Authenticate": 'Basic realm="eata", Bearer'}  # Basic, so that a browser asks for the token


class Gate:
    """ASGI middleware, as plain as it gets: it runs for every request.

    Args:
        app: what is behind.
        token: that everything but health needs; None leaves all open but the admin endpoints, which are then shut.
        body: most bytes in one request.
        metrics: where requests are counted.
    """

    def __init__(self, app: ASGIApp, token: str | None, body: int, metrics: Metrics) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._body = body
        self._metrics = metrics
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 500

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        headers = Headers(scope=scope)
        held = 0
        try:
            self._authorize(scope["path"], scope["method"], headers)
            held = self._admit(headers)
            await self._app(scope, self._limited(receive), counting_send)
        except Refusal as refusal:
            await respond(counting_send, refusal)
        finally:
            self._held -= held
            endpoint = getattr(scope.get("route"), "path", "other")  # never the raw path: a client chooses that
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.latency.labels(endpoint).observe(time.monotonic() - began)

    def _authorize(self, path: str, method: str, headers: Headers) -> None:
        if path in OPEN:
            return
        if self._token is None:
            if path in ADMIN:
                raise Refusal(403, "The server was started without a token, so nobody can prove to be its operator.")
            return
        if not hmac.compare_digest(_given(headers.get("authorization", "")), self._token):
            raise Refusal(401, "Send the server's token: 'Authorization: Bearer TOKEN'.", CHALLENGE)
        origin = headers.get("origin")
        if method != "GET" and origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise Refusal(403, "A page of another site may not use the token that a browser remembers.")

    def _admit(self, headers: Headers) -> int:
        """Bytes that this request may hold, which count against those of all."""
        text = headers.get("content-length")
        if text is None:
            length = self._body if "transfer-encoding" in headers else 0
        elif text.isascii() and text.isdigit() and len(text) < 20:
            length = int(text)
        else:
            raise Refusal(400, "Content-Length has to be a number.")
        if length > self._body:
            raise Refusal(
                413, f"The body has {length:,} bytes; at most {self._body:,} are taken.", {"Connection": "close"}
            )
        if length and self._held + length > AT_ONCE * self._body:
            raise Refusal(429, "Too many requests at once; try again.", {"Retry-After": "1"})
        self._held += length
        return length

    def _limited(self, receive: Receive) -> Receive:
        got = 0

        async def limited() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._body:
                text = f"The body has more than the {self._body:,} bytes that are taken."
                raise Refusal(413, text, {"Connection": "close"})
            return message

        return limited


def _given(authorization: str) -> bytes:
    """The token in a header: after ``Bearer``, or as the password after ``Basic``, with whatever name.

    >>> _given("Bearer secret"), _given("Basic " + base64.b64encode(b"me:secret").decode())
    (b'secret', b'secret')
    """
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return rest.encode("latin-1") if scheme.lower() == "bearer" else b""


async def respond(send: Send, refusal: Refusal) -> None:
    """Answer with a JSON error."""
    body = error(refusal)
    headers: Mapping[str, str] = {
        "Content-Type": "application/json", "Content-Length": str(len(body)), **refusal.headers
    }  # fmt: skip
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def error(refusal: Refusal) -> bytes:
    """The body of a refusal, in the protocol's form."""
    return json.dumps({"error": str(refusal)}).encode()
