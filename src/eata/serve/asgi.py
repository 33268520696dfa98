"""The ASGI app: endpoints behind the gate, around one engine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from torch import nn

import eata
from eata.adapter import Adapter
from eata.inputs import in_range
from eata.serve import schema
from eata.serve.contract import Contract
from eata.serve.endpoints import Endpoints
from eata.serve.engine import Engine
from eata.serve.gate import Gate, error
from eata.serve.queue import Settings
from eata.serve.refusal import Refusal
from eata.serve.versions import Versions

MEGABYTE = 1 << 20
#: Seconds after which a thread that parses gives way to the writer; Python's own 5 ms would cost it that at each step.
SWITCH = 0.0005
MODEL = "/v2/models/{model}"
INFER = MODEL + "/infer"
PAUSE_SOFT = 1  # from OpenMP's omp.h


def app(
    model: Adapter,
    *,
    name: str = "model",
    source: nn.Module | None = None,
    state: str | Path | None = None,
    token: str | None = None,
    batch: int = 64,
    wait: float = 10.0,
    queue: int = 512,
    timeout: float = 30.0,
    share: float = 1.0,
    save_every: int = 20,
    body: float = 16.0,
) -> FastAPI:
    """An ASGI app that predicts with ``model``, and lets it adapt to what it is sent.

    Requests are joined to batches and answered by one thread, which starts and ends with the app (its *lifespan*).

    Args:
        model: an adapter; its net has to have ``pretrained_cfg`` (``eata.models.load`` and timm set it). With
            BatchNorm wrap it in ``eata.Window``, because batches are as small as the traffic makes them.
        name: of the model in addresses.
        source: an untouched copy of the net, to tell how often the source model would have said something else; None
            tells nothing.
        state: folder for the versions; None keeps them in memory.
        token: that everything but health needs; without one the admin endpoints are shut.
        batch: most samples a batch, and a request; 64.
        wait: milliseconds that the first request of a batch waits for others; 10.
        queue: most samples that wait; 512. More are refused (429).
        timeout: seconds that a request may wait; 30. Then it is refused (504).
        share: most of a step that one client may have, above 0; 1, the default, is no limit.
        save_every: batches between two saves; 20.
        body: most megabytes in one request; 16.

    >>> import eata
    >>> server = app(eata.Source(eata.models.load("resnet26-bn-digits")), name="digits")
    >>> server.title
    'eata serve: digits'
    """
    in_range("body", body, low=0, open_low=True)
    settings = Settings.checked(
        batch=batch, wait=wait, queue=queue, timeout=timeout, share=share, save_every=save_every
    )
    contract = Contract.of(model.net, name, batch)
    versions = Versions(None if state is None else Path(state))
    return build(Engine(model, contract, settings, versions, source), token, round(body * MEGABYTE))


def build(engine: Engine, token: str | None, body: int) -> FastAPI:
    """The app around an engine."""
    to = Endpoints(engine, token is not None)
    server = Server(
        to,
        title=f"eata serve: {engine.contract.name}",
        version=eata.__version__,
        lifespan=_lifespan(engine),
        docs_url=None,  # FastAPI's own page fetches scripts from elsewhere
        redoc_url=None,
    )
    server.state.engine = engine
    _route(server, to, engine.contract)
    server.add_exception_handler(Refusal, _refused)
    server.add_exception_handler(HTTPException, _refused)
    server.add_exception_handler(RequestValidationError, _refused)
    server.add_exception_handler(Exception, _refused)
    server.gate = Gate(server.behind_gate, token, body, engine.metrics)
    return server


class Server(FastAPI):
    """FastAPI behind the gate, with a short way to the one address that has nearly all of the traffic.

    FastAPI's way there (telemetry, middleware, routes, dependencies) takes more time than all else about a request.

    Args:
        to: the endpoints.
        more: what FastAPI takes.
    """

    gate: Gate

    def __init__(self, to: Endpoints, **more: Any) -> None:
        super().__init__(**more)
        self._to = to
        self._often = INFER.format(model=to.contract.name)
        self._route = Route(INFER, to.infer)  # by whose name the gate counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the life of the app."""
        await (self.gate if scope["type"] == "http" else super().__call__)(scope, receive, send)

    async def behind_gate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request that may pass."""
        if scope["path"] != self._often or scope["method"] != "POST":
            await super().__call__(scope, receive, send)
            return
        scope["route"] = self._route
        request = Request(scope, receive)
        try:
            response = await self._to.infer(request, self._to.contract.name)
        except Exception as problem:
            await (await _refused(request, problem))(scope, receive, send)
            if isinstance(problem, Refusal):
                return
            raise  # for the log
        await response(scope, receive, send)


def _lifespan(engine: Engine) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH))
        await asyncio.to_thread(engine.start)
        let_helpers_go()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.stop)
            sys.setswitchinterval(before)

    return lifespan


def let_helpers_go() -> None:
    """End the OpenMP threads that this thread, which made the model, keeps beside those of the writer's.

    With more of them than cores, OpenMP puts a helper to sleep after each operation instead of letting it wait awake,
    and a batch takes half as long again. Without OpenMP (or an old one) nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).omp_pause_resource_all(PAUSE_SOFT)


def _route(server: FastAPI, to: Endpoints, contract: Contract) -> None:
    def add(method: str, path: str, endpoint: Any, *statuses: int, **more: Any) -> None:
        server.add_api_route(path, endpoint, methods=[method], responses=schema.errors(401, *statuses), **more)

    asked = (400, 404, 408, 413, 415, 429, 500, 503, 504)
    add("GET", "/v2", to.server)
    add("GET", "/v2/health/live", to.live)
    add("GET", "/v2/health/ready", to.ready)
    for path in (MODEL, MODEL + "/versions/{version}"):
        add("GET", path, to.model, 404)
        add("GET", path + "/ready", to.model_ready, 404)
        add("POST", path + "/infer", to.infer, *asked, openapi_extra=schema.infer(contract))
    add("POST", "/predict", to.predict, *asked, openapi_extra=schema.files())
    add("GET", "/v1/adaptation", to.adaptation)
    add("GET", "/v1/adaptation/live", to.live_data)
    for name in ("freeze", "resume", "reset"):
        add("POST", f"/v1/adaptation/{name}", getattr(to, name), 403, 503)
    add("POST", "/v1/adaptation/rollback", to.rollback, 400, 403, 404, 503, openapi_extra=schema.rollback())
    add("GET", "/metrics", to.metrics)
    add("GET", "/", to.page, include_in_schema=False)
    add("GET", "/docs", to.docs, include_in_schema=False)


async def _refused(_: Request, problem: Exception) -> Response:
    """Every error leaves in the protocol's form."""
    if isinstance(problem, HTTPException):
        problem = Refusal(problem.status_code, str(problem.detail), problem.headers)
    elif isinstance(problem, RequestValidationError):
        problem = Refusal(400, "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in problem.errors()))
    elif not isinstance(problem, Refusal):
        problem = Refusal(500, "The server failed on this request; its log says more.")
    return Response(error(problem), problem.status, problem.headers, "application/json")
