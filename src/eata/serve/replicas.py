"""Many processes on Ray Serve: replicas predict with published versions, one writer adapts on a sample of the traffic.

Only adapted parameters travel. A replica that dies is replaced by Ray Serve. While the writer is gone the replicas go
on with the version they have; Ray starts it again, and it goes on from its state folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eata.errors import EataError
from eata.serve.asgi import MEGABYTE, build
from eata.serve.contract import Contract
from eata.serve.engine import Engine
from eata.serve.queue import Command, Job, Settings
from eata.serve.recipe import Recipe
from eata.serve.refusal import Refusal
from eata.serve.versions import Mark, Versions

WRITER, NAMESPACE = "eata-writer", "eata"
POLL = 0.5  # seconds between two looks for a new version
PATIENCE = 10.0  # seconds that the writer may take to answer
PENDING = 64  # samples of traffic on their way to the writer; more are left out
log = logging.getLogger("eata.serve")


class Writer:
    """In a process of its own: an engine that learns from what replicas pass on, and publishes."""

    def __init__(self, recipe: Recipe, name: str, settings: Settings, state: str) -> None:
        net = recipe.net()
        self._source = {key: value.detach().clone() for key, value in net.named_parameters()}
        contract = Contract.of(net, name, settings.batch)
        self._engine = Engine(recipe.adapter(net), contract, settings, Versions(Path(state)), recipe.net())
        self._engine.start()

    def learn(self, values: Any, client: str) -> None:
        """Learn from a request that a replica has answered; a full queue leaves it out."""
        with contextlib.suppress(Refusal):
            self._engine.submit(values.copy(), client)

    def published(self, known: int) -> tuple[Mark, dict[str, Tensor]] | None:
        """The served version and the parameters in which it differs from the source; None if it is ``known``."""
        if self._engine.mark.version == known:
            return None
        mark, parameters = self._engine.snapshot().result(PATIENCE)
        changed = {key: value for key, value in parameters.items() if not torch.equal(value, self._source[key])}
        return mark, {key: value.cpu() for key, value in changed.items()}

    def command(self, name: str, *arguments: Any) -> None:
        """An operator's command."""
        getattr(self._engine, name)(*arguments).result(PATIENCE)

    def report(self, kind: Literal["adaptation", "live"]) -> dict[str, Any]:
        """What the engine tells."""
        return self._engine.report(kind)

    def stop(self) -> None:
        """Learn from what waits, and save."""
        self._engine.stop()


class Follower(Engine):
    """The engine of a replica: it predicts with the newest published version, and passes traffic on."""

    def __init__(self, recipe: Recipe, name: str, settings: Settings, replicas: int) -> None:
        net = recipe.net()
        self._source_parameters = {key: value.detach().clone() for key, value in net.named_parameters()}
        super().__init__(recipe.reader(net), Contract.of(net, name, settings.batch), settings, Versions(None), None)
        self._replicas = replicas
        self._stopping = threading.Event()
        self._calls = ThreadPoolExecutor(4)
        self._answers = True
        self._traffic: Any = None

    def start(self) -> None:
        super().start()
        self._adopt_newest()  # before the first request
        threading.Thread(target=self._follow, name="eata-follower", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        super().stop()

    def freeze(self, frozen: bool) -> Future[Any]:
        return self._ask_writer("freeze", frozen)

    def reset(self) -> Future[Any]:
        return self._ask_writer("reset")

    def rollback(self, version: int) -> Future[Any]:
        return self._ask_writer("rollback", version)

    def report(self, kind: Literal["adaptation", "live"]) -> dict[str, Any]:
        try:
            return {**_get(_writer().report.remote(kind)), "writer": True, "replicas": self._replicas}
        except Refusal:
            return {**super().report(kind), "writer": False, "replicas": self._replicas}

    def _ask_writer(self, name: str, *arguments: Any) -> Future[Any]:
        def ask() -> None:
            _get(_writer().command.remote(name, *arguments))
            self._adopt_newest()

        return self._calls.submit(ask)

    def _follow(self) -> None:
        while not self._stopping.wait(POLL):
            self._adopt_newest()

    def _adopt_newest(self) -> None:
        """Take over what the writer has published; a writer that is gone is said once."""
        try:
            found = _get(_writer().published.remote(self.mark.version))
            if found is not None:
                self._queue.add(Command(lambda: self._adopt(*found), Future())).future.result(PATIENCE)
            back, self._answers = not self._answers, True
        except (Refusal, TimeoutError) as problem:
            back, lost, self._answers = False, self._answers, False
            if lost and not self._stopping.is_set():
                self._event("failure", f"The writer is gone ({problem}); version {self.mark.version} goes on.")
        if back:
            self._event("start", "The writer is back.")

    def _adopt(self, mark: Mark, changed: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for key, value in self.model.net.named_parameters():
                value.copy_(changed.get(key, self._source_parameters[key]))
        self.mark = dataclasses.replace(mark, frozen=False)  # the writer's switch; here nothing is learnt anyway
        self._show()

    def _after(self, jobs: list[Job], logits: Tensor, version: int, learnt: int, chosen: int) -> None:
        super()._after(jobs, logits, version, learnt, chosen)
        try:
            self._traffic = self._traffic or _writer()  # one handle: the limit of pending calls is a handle's own
            for job in jobs:
                if random.random() * self._replicas < 1:  # all replicas together: what one server gets
                    self._traffic.learn.remote(job.values, job.client)
        except Exception:  # a busy or missing writer must not hold up a replica
            log.debug("traffic was not passed on", exc_info=True)

    def _save(self) -> None:
        """Nothing: the writer does."""


def _ray() -> tuple[Any, Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own workers come last; these have clients that wait
    try:
        import ray
        from ray import serve
    except ImportError as problem:
        raise EataError(f"--replicas needs Ray Serve ({problem.name} is missing): pip install 'eata[ray]'.") from None
    return ray, serve


def _writer() -> Any:
    ray, _ = _ray()
    try:
        return ray.get_actor(WRITER, NAMESPACE)
    except ValueError:
        raise Refusal(503, "The writer is gone; its replicas go on with the version they have.") from None


def _get(reference: Any) -> Any:
    """The answer of a call to the writer; a writer that is gone becomes a refusal."""
    ray, _ = _ray()
    try:
        return ray.get(reference, timeout=PATIENCE)
    except ray.exceptions.RayTaskError as problem:
        cause = problem.cause
        raise cause if isinstance(cause, Refusal) else Refusal(500, f"The writer failed: {cause}") from None
    except ray.exceptions.RayError:
        raise Refusal(503, "The writer is gone; its replicas go on with the version they have.") from None


def deploy(
    recipe: Recipe, replicas: int, options: dict[str, Any], token: str | None, body: float, host: str, port: int
) -> Callable[[], None]:
    """Start the writer and the replicas on a Ray cluster; gives the function that stops them.

    Args:
        recipe: what is served.
        replicas: how many predict.
        options: ``name``, ``state`` and the settings of ``eata.serve.app``.
        token: as in ``eata.serve.app``.
        body: as in ``eata.serve.app``.
        host: address to listen at.
        port: port to listen at.
    """
    name, state = options["name"], options["state"]
    settings = Settings.checked(**{key: value for key, value in options.items() if key not in ("name", "state")})
    if state is None:
        raise EataError("--replicas needs a --state folder, from which a writer that died goes on.")
    ray, serve = _ray()
    weights, fisher = (path and path.absolute() for path in (recipe.weights, recipe.fisher))  # seen from any folder
    recipe = dataclasses.replace(recipe, weights=weights, fisher=fisher)
    Contract.of(recipe.net(), name, settings.batch)  # what is wrong with the model is said here, not in a worker's log
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", namespace=NAMESPACE)
    started = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4, max_pending_calls=PENDING)(Writer)
    writer = started.options(name=WRITER).remote(recipe, name, settings, str(Path(state).absolute()))
    try:
        ray.get(writer.report.remote("adaptation"))
    except ray.exceptions.RayError as problem:
        ray.shutdown()
        raise EataError(f"The writer did not start: {str(problem).strip().rpartition(chr(10))[2]}") from None

    def app() -> Any:
        return build(Follower(recipe, name, settings, replicas), token, round(body * MEGABYTE))

    serve.start(http_options={"host": host, "port": port})
    deployment = serve.deployment(num_replicas=replicas, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
    serve.run(deployment(serve.ingress(app)()).options(name="replica").bind(), name="eata", route_prefix="/")

    def stop() -> None:
        serve.shutdown()  # no request comes any more
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(writer.stop.remote(), timeout=60)
        ray.shutdown()

    return stop


def run(
    recipe: Recipe, replicas: int, options: dict[str, Any], token: str | None, body: float, host: str, port: int
) -> None:
    """As ``deploy``, until SIGTERM or Ctrl-C."""
    stop = deploy(recipe, replicas, options, token, body, host, port)
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which has handlers of its own that stop at once
        signal.signal(number, lambda *_: told.set())
    log.info("%d replicas and a writer at http://%s:%d (Ctrl-C stops them)", replicas, host, port)
    while not told.is_set():
        time.sleep(0.2)
    stop()
