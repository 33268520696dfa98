"""The endpoints: parse, ask the engine, answer."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

import eata
from eata.serve import metrics, pictures, protocol, share
from eata.serve.contract import Floats
from eata.serve.engine import Engine
from eata.serve.queue import Answer
from eata.serve.refusal import Refusal

PAGES = Path(__file__).parent
LARGE = 1 << 18  # bytes of a body that is parsed in a thread of its own
DECODERS = 2  # images decoded at once: each may need a hundred megabytes
TOP = 5  # classes told of each image
#: What a page of ours may do: show itself, and ask this server.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Endpoints:
    """One function for each address.

    Args:
        engine: that answers.
        operated: whether there is a token, so that the admin endpoints work.
    """

    def __init__(self, engine: Engine, operated: bool) -> None:
        self.engine = engine
        self.contract = engine.contract
        self.operated = operated
        self._decoders = asyncio.Semaphore(DECODERS)

    # --- Open Inference Protocol v2 -------------------------------------------------------------------------------

    async def server(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        return {"name": "eata", "version": eata.__version__, "extensions": ["binary_tensor_data"]}

    async def live(self) -> Response:
        """Whether the server works."""
        return JSONResponse({"live": self.engine.alive}, 200 if self.engine.alive else 503)

    async def ready(self) -> Response:
        """Whether the server takes requests."""
        return JSONResponse({"ready": self.engine.ready}, 200 if self.engine.ready else 503)

    async def model(self, model: str, version: str | None = None) -> dict[str, Any]:
        """Inputs, outputs and versions of the model."""
        self._find(model, version)
        return protocol.metadata(self.contract, self._versions())

    async def model_ready(self, model: str, version: str | None = None) -> Response:
        """Whether the model takes requests."""
        self._find(model, version)
        return JSONResponse({"name": model, "ready": self.engine.ready}, 200 if self.engine.ready else 503)

    async def infer(self, request: Request, model: str, version: str | None = None) -> Response:
        """Logits for a batch of images. Without a version the model learns from it; a kept version only predicts.

        The input is float32, (n, C, H, W), normalized as in training: (pixel / 255 - mean) / std. With the header
        Inference-Header-Content-Length the body is that many bytes of JSON and then the values as little-endian
        float32 (the protocol's binary extension).
        """
        pinned = self._find(model, version)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "The body is compressed; send it as it is.")
        body = await self._body(request)
        arguments = (body, request.headers.get(protocol.LENGTH_HEADER), self.contract)
        if len(body) < LARGE:
            parsed = protocol.parse(*arguments)
        else:
            parsed = await run_in_threadpool(protocol.parse, *arguments)
        answer = await self._ask(parsed.values, request, pinned)
        content, headers = protocol.answer(parsed, self.contract, answer.version, answer.logits)
        return Response(content, headers=headers)

    # --- for people -----------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> dict[str, Any]:
        """Classes and confidences for one or several image files, sent as a form (multipart).

        The model learns from them. Files are JPEG, PNG, WEBP, BMP or GIF; the form's field may have any name.
        """
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise Refusal(415, "Send image files as a form: curl -F files=@cat.jpg ADDRESS/predict")
        await self._body(request)  # all of it, in time; the form is then taken apart in memory
        limit = self.contract.batch
        async with request.form(max_files=limit, max_fields=limit) as form:
            files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
            if not files:
                raise Refusal(400, "The form has no file: curl -F files=@cat.jpg ADDRESS/predict")
            names = [_plain(file.filename) for file in files]
            values = [await self._decoded(await file.read(), name) for file, name in zip(files, names, strict=True)]
        answer = await self._ask(pictures.joined(values), request, None)
        found = [{"file": name, **self._told(row)} for name, row in zip(names, answer.logits, strict=True)]
        return {"model": self.contract.name, "version": answer.version, "predictions": found}

    async def page(self) -> Response:
        """The live page."""
        return HTMLResponse((PAGES / "page.html").read_text(), headers={"Content-Security-Policy": POLICY})

    async def docs(self) -> Response:
        """The endpoints, for people."""
        return HTMLResponse((PAGES / "docs.html").read_text(), headers={"Content-Security-Policy": POLICY})

    async def metrics(self) -> Response:
        """Counters and gauges in Prometheus' form."""
        return Response(self.engine.metrics.text(), media_type=metrics.CONTENT_TYPE)

    # --- adaptation -----------------------------------------------------------------------------------------------

    async def adaptation(self) -> dict[str, Any]:
        """What adaptation does: stats, drift, events, versions."""
        return await run_in_threadpool(self.engine.report, "adaptation")

    async def live_data(self) -> dict[str, Any]:
        """What the live page shows: the above, the last minutes as series, and the last images."""
        return {**await run_in_threadpool(self.engine.report, "live"), "operated": self.operated}

    async def freeze(self) -> dict[str, Any]:
        """Switch adaptation off: predict only."""
        return await self._obeyed(self.engine.freeze(True))

    async def resume(self) -> dict[str, Any]:
        """Switch adaptation on again."""
        return await self._obeyed(self.engine.freeze(False))

    async def reset(self) -> dict[str, Any]:
        """Back to the source model."""
        return await self._obeyed(self.engine.reset())

    async def rollback(self, request: Request) -> dict[str, Any]:
        """Back to a kept version: {"version": 12}."""
        body = await self._body(request)
        try:
            wanted = json.loads(body)["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            wanted = None
        if type(wanted) is not int:
            raise Refusal(400, 'Say which version to go back to: {"version": 12}.')
        return await self._obeyed(self.engine.rollback(wanted))

    # --- helpers --------------------------------------------------------------------------------------------------

    def _versions(self) -> list[int]:
        return sorted({kept.version for kept in self.engine.versions.kept} | {self.engine.mark.version})

    def _find(self, model: str, version: str | None) -> int | None:
        """The number of the version that is asked for, None where none is; raises for what is not here."""
        if model != self.contract.name:
            raise Refusal(404, f"There is no model {_plain(model)!r}; this server has {self.contract.name!r}.")
        if version is None:
            return None
        known = {str(number): number for number in self._versions()}
        if version not in known:
            raise Refusal(404, f"There is no version {_plain(version)!r}, or it is no longer kept.")
        return known[version]

    async def _body(self, request: Request) -> bytes:
        try:
            return await asyncio.wait_for(request.body(), self.engine.settings.timeout)
        except asyncio.TimeoutError:
            raise Refusal(408, "The body did not arrive in time.", {"Connection": "close"}) from None

    async def _ask(self, values: Floats, request: Request, version: int | None) -> Answer:
        """Wait for the engine. A request that it has begun is answered, however late: it has been learnt from."""
        client = share.identity(request.client.host if request.client else "")
        future = self.engine.submit(values, client, version)
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([waiting], timeout=self.engine.settings.timeout)
        if not done and future.cancel():
            raise Refusal(504, f"The model was busy for {self.engine.settings.timeout:g} seconds; nothing was learnt.")
        return await waiting

    async def _obeyed(self, future: Future[Any]) -> dict[str, Any]:
        await asyncio.wrap_future(future)
        return await self.adaptation()

    async def _decoded(self, content: bytes, name: str) -> Floats:
        async with self._decoders:
            return await run_in_threadpool(pictures.decoded, content, name, self.contract)

    def _told(self, logits: Floats) -> dict[str, Any]:
        """The likeliest classes of one image."""
        shares = pictures.softmax(logits)
        order = shares.argsort()[::-1][:TOP].tolist()
        top = [{"class": self.contract.class_names[at], "confidence": round(float(shares[at]), 6)} for at in order]
        return {"index": order[0], **top[0], "top": top}


def _plain(text: str | None) -> str:
    """A client's own word, short and printable, to be said back."""
    return "".join(letter if letter.isprintable() else "?" for letter in (text or "file"))[:80]
