"""The one writer: a thread that joins waiting requests to batches, predicts, adapts, and keeps versions."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from eata import functional
from eata.adapter import Adapter
from eata.errors import EataError, StateError
from eata.methods import Source
from eata.serve import report, share, watch
from eata.serve.contract import Contract, Floats
from eata.serve.history import FRESH, History, Point, Seen
from eata.serve.metrics import Metrics
from eata.serve.queue import Answer, Command, Job, Queue, Settings
from eata.serve.refusal import Refusal
from eata.serve.versions import Loss, Mark, Versions

COMPARE = 16  # one batch in so many is shown to the source model too
log = logging.getLogger("eata.serve")


class Engine:
    """Many may ask, one thread answers: only that thread ever touches the model.

    Args:
        model: an adapter.
        contract: what the model takes.
        settings: how requests become batches.
        versions: where they are kept.
        source: an untouched copy of the net, which every 16th batch is compared with; None compares nothing.
    """

    def __init__(
        self, model: Adapter, contract: Contract, settings: Settings, versions: Versions, source: nn.Module | None
    ) -> None:
        self.model = model
        self.contract = contract
        self.settings = settings
        self.versions = versions
        self.metrics = Metrics()
        self.history = History(len(contract.class_names))
        self.mark = Mark()
        self.loss: Loss | None = None
        #: the model's stats, and its drift in nats, as of the last batch; for threads that may not touch the model
        self.stats: dict[str, int] = {}
        self.drift: float | None = None
        self._shown: int | None = None
        self._source = None if source is None else Source(source)
        self._device = next(model.net.parameters()).device
        self._queue = Queue(settings)
        self._thread: threading.Thread | None = None
        self._saved = Mark()
        self._count = 0
        self._decisions = watch.Decisions(model)
        self.metrics.queue.set_function(lambda: self._queue.samples)

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the state folder, go on from its last save, and begin to answer; nothing where that has been done."""
        if self.alive:
            return
        try:
            opened = self.versions.open()
            if opened is not None:
                self.mark, self.loss = opened
                self._load(self.mark.version)
                self._tell_start()  # before the save, after which nobody could tell any more
            self.versions.save(self.model.state_dict(), self.mark)
            self._saved = self.mark
        except BaseException:
            self.versions.close()
            raise
        self._show()
        self._thread = threading.Thread(target=self._run, name="eata-writer", daemon=True)
        self._thread.start()

    def _tell_start(self) -> None:
        going_on = f"Going on from version {self.mark.version}"
        if self.loss is None:
            self._event("start", f"{going_on}; nothing was lost.")
        else:
            self.metrics.lost.inc(self.loss.batches)
            self._event("lost", f"{self.loss} {going_on}.")

    def stop(self) -> None:
        """Answer what waits, save, and let go of the state folder."""
        self._queue.close()
        if self._thread is not None:
            self._thread.join()
        self.versions.close()

    @property
    def alive(self) -> bool:
        """Whether the writer runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.alive and not self._queue.closed

    @property
    def queued(self) -> int:
        """Samples that wait."""
        return self._queue.samples

    # --- for the threads that ask ---------------------------------------------------------------------------------

    def submit(self, values: Floats, client: str, version: int | None = None) -> Future[Answer]:
        """Queue checked samples; a full queue raises a ``Refusal``."""
        return self._queue.add(Job(values, client, version, time.monotonic(), Future())).future

    def freeze(self, frozen: bool) -> Future[Any]:
        """Switch adaptation off, or on again."""

        def run() -> None:
            self.mark = dataclasses.replace(self.mark, frozen=frozen)
            self._changed("freeze" if frozen else "resume", f"Adaptation was switched {'off' if frozen else 'on'}.")

        return self._queue.add(Command(run, Future())).future

    def reset(self) -> Future[Any]:
        """Back to the source model, as a new version."""

        def run() -> None:
            self._save()  # the way back to what is left behind
            self.model.reset()
            self._decisions = watch.Decisions(self.model)
            self._next_version()
            self._changed("reset", f"Back to the source model, as version {self.mark.version}.")

        return self._queue.add(Command(run, Future())).future

    def rollback(self, version: int) -> Future[Any]:
        """Back to a kept version."""

        def run() -> None:
            left = self.mark.version
            self._require_kept(version)
            self._save()
            self._load(version)
            self.mark = dataclasses.replace(self.mark, version=version)
            self._changed("rollback", f"Back from version {left} to {version}.")

        return self._queue.add(Command(run, Future())).future

    def snapshot(self) -> Future[tuple[Mark, dict[str, Tensor]]]:
        """The version that is served, and its parameters: of one moment, between two batches."""

        def run() -> tuple[Mark, dict[str, Tensor]]:
            return self.mark, {name: value.detach().clone() for name, value in self.model.net.named_parameters()}

        return self._queue.add(Command(run, Future())).future

    def report(self, kind: Literal["adaptation", "live"]) -> dict[str, Any]:
        """What there is to tell, for programs or for the live page."""
        return report.live(self) if kind == "live" else report.adaptation(self)

    # --- the writer's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while work := self._queue.next():
            if isinstance(work, Command):
                self._obey(work)
                continue
            jobs = [job for job in work if job.future.set_running_or_notify_cancel()]  # those that gave up are gone
            for version in {job.version for job in jobs} - {None}:
                self._guarded([job for job in jobs if job.version == version], self._answer_pinned)
            self._guarded([job for job in jobs if job.version is None], self._answer)
        self._save()

    def _obey(self, command: Command) -> None:
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            command.future.set_result(command.run())
        except Exception as problem:
            if not isinstance(problem, EataError):
                log.exception("a command failed")
                problem = Refusal(500, f"It failed ({type(problem).__name__}); the server's log says more.")
            command.future.set_exception(problem)

    def _guarded(self, jobs: list[Job], answer: Callable[[list[Job]], None]) -> None:
        """Answer jobs; whatever goes wrong is their answer, and the thread goes on."""
        if not jobs:
            return
        try:
            answer(jobs)
        except Exception as problem:
            if not isinstance(problem, Refusal):
                log.exception("a batch failed")
                self.metrics.failures.labels("batch").inc()
                self._event("failure", f"A batch of {len(jobs)} requests failed: {type(problem).__name__}: {problem}")
                problem = Refusal(500, f"The model failed on this batch ({type(problem).__name__}).")
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(problem)

    def _answer(self, jobs: list[Job]) -> None:
        """Predict and learn; the answers leave as soon as they are certain, and the journal knows what they rest on."""
        clients = [job.client for job in jobs for _ in job.values]
        held = share.held_back(clients, self.settings.share)
        version = self.mark.version
        stats = self.model.stats
        steps, chosen = stats.steps, stats.backwards
        began = time.monotonic()
        x = torch.from_numpy(np.concatenate([job.values for job in jobs]))
        logits = self._predict(x, held, lambda early: self._answer_early(jobs, early, version))
        seconds = time.monotonic() - began
        decided = self._heed_guard()
        if not self.mark.frozen:
            self.mark = dataclasses.replace(self.mark, batches=self.mark.batches + 1)
            if decided or self.model.stats.steps != steps:
                self._next_version()
        version = self.mark.version if decided else version  # a guard's decision is about the batch at hand already
        self.versions.acknowledge(self.mark)
        self._show()
        self._deliver(jobs, logits, version)
        fresh = self.model.stats
        self.metrics.step.observe(seconds)
        self.metrics.steps.inc(fresh.steps - steps)
        self.metrics.chosen.inc(fresh.backwards - chosen)
        self.metrics.share.set(share.largest([client for client, out in zip(clients, held, strict=True) if not out]))
        self.metrics.limited.inc(int(held.sum()))
        learnt = 0 if self.mark.frozen else int((~held).sum())
        self._after(jobs, logits, version, learnt, fresh.backwards - chosen)
        if self.mark.batches - self._saved.batches >= self.settings.save_every:
            self._save()

    def _answer_early(self, jobs: list[Job], logits: Tensor, version: int) -> None:
        """Answer while the model still learns: clients have their next requests ready when it is done."""
        if len(logits) == sum(len(job.values) for job in jobs):
            self.versions.acknowledge(dataclasses.replace(self.mark, batches=self.mark.batches + 1))
            self._deliver(jobs, logits, version)

    def _heed_guard(self) -> bool:
        """Tell what a guard has decided; whether it has."""
        decisions = self._decisions.fresh(self.model)
        for kind, text in decisions:
            self.metrics.alarms.inc(kind == "alarm")
            self._event(kind, text)
        return bool(decisions)

    def _answer_pinned(self, jobs: list[Job]) -> None:
        """Predict with a kept version, and put everything back."""
        version = jobs[0].version
        assert version is not None
        x = torch.from_numpy(np.concatenate([job.values for job in jobs]))
        everything = np.ones(len(x), bool)
        if version == self.mark.version:
            self._deliver(jobs, self._predict(x, everything), version)
            return
        self._require_kept(version)
        now = self.model.state_dict()
        try:
            self._load(version)
            logits = self._predict(x, everything)
        finally:
            self._restore(now)
        self._deliver(jobs, logits, version)

    def _predict(
        self, x: Tensor, held: np.ndarray[Any, np.dtype[np.bool_]], early: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Logits of all, learning from those that are not held back; all are made by the weights of before.

        Args:
            x: the samples.
            held: which are held back.
            early: gets the logits before the model learns, if they are certain by then.
        """
        x = x.to(self._device)
        if self.mark.frozen or held.all():
            with self.model.frozen():
                return self.model(x).cpu()
        if not held.any():
            return self._learnt(x, early)
        rows = torch.from_numpy(held).to(self._device)
        with self.model.frozen():
            outside = self.model(x[rows])
        inside = self.model(x[~rows])
        logits = inside.new_empty((len(x), *inside.shape[1:]))
        logits[rows], logits[~rows] = outside, inside
        return logits.cpu()

    def _learnt(self, x: Tensor, early: Callable[[Tensor], None] | None) -> Tensor:
        self.model.on_answer = None if early is None else lambda logits: early(logits.cpu())
        try:
            return self.model(x).cpu()
        finally:
            self.model.on_answer = None

    def _deliver(self, jobs: list[Job], logits: Tensor, version: int) -> None:
        """Answer, unless that was done early."""
        if all(job.future.done() for job in jobs):
            return
        found = logits.float().numpy()
        finite = np.isfinite(found).all(1)
        if not finite.all():
            self._event("failure", f"{int((~finite).sum())} samples got no finite answer from version {version}.")
        at = 0
        for job in jobs:
            rows = slice(at, at := at + len(job.values))
            if finite[rows].all():
                job.future.set_result(Answer(found[rows], version))
            else:
                job.future.set_exception(Refusal(500, f"Version {version} gave no finite answer."))

    def _after(self, jobs: list[Job], logits: Tensor, version: int, learnt: int, chosen: int) -> None:
        """What operators look at."""
        metrics, samples = self.metrics, len(logits)
        confidence, best = logits.softmax(1).max(1)
        entropy = float(functional.entropy(logits).mean())
        self._count += 1
        metrics.batch.observe(samples)
        metrics.batches.inc()
        metrics.samples.inc(samples)
        metrics.entropy.set(entropy)
        shown = [self.contract.pixels(row) for job in jobs[:FRESH] for row in job.values[:FRESH]][:FRESH]
        seen = [Seen(*each, version) for each in zip(shown, best.tolist(), confidence.tolist(), strict=False)]
        point = Point(int(time.time()), samples, 1, entropy * samples, learnt, chosen, self.drift, self.mark.version)
        self.history.add(point, seen)
        if self._source is not None and self._count % COMPARE == 1:
            x = torch.from_numpy(np.concatenate([job.values for job in jobs])).to(self._device)
            source = self._source(x).argmax(1).cpu()
            metrics.disagreement.set(float((source != best).float().mean()))
            self.history.compare(best.numpy(), source.numpy())

    def _show(self) -> None:
        """Put what others may see of the model where they can see it."""
        self.stats = dataclasses.asdict(self.model.stats)
        if self._shown != self.mark.version:  # drift takes some operations for each layer
            self._shown, self.drift = self.mark.version, watch.drift(self.model)
        if self.drift is not None:
            self.metrics.drift.set(self.drift)
        self.metrics.version.set(self.mark.version)
        self.metrics.kept.set(len(self.versions.kept))
        self.metrics.frozen.set(self.mark.frozen)

    # --- versions -------------------------------------------------------------------------------------------------

    def _next_version(self) -> None:
        number = self.mark.highest + 1
        self.mark = dataclasses.replace(self.mark, version=number, highest=number)

    def _require_kept(self, version: int) -> None:
        if all(kept.version != version for kept in self.versions.kept):
            raise Refusal(404, f"There is no version {version}, or it is no longer kept.")

    def _load(self, version: int) -> None:
        try:
            self._restore(self.versions.read(version))
        except EataError as problem:
            where = "" if self.versions.folder is None else f"{self.versions.folder}: "
            raise StateError(f"{where}{problem}") from None

    def _restore(self, adaptation: Any) -> None:
        self.model.load_state_dict(adaptation)
        self._decisions = watch.Decisions(self.model)  # those of then were told then

    def _save(self) -> None:
        """Keep this version. A full disk must not stop the answers; it is said, and the next save tries again."""
        self._saved = self.mark
        try:
            self.versions.save(self.model.state_dict(), self.mark)
        except OSError as problem:
            self.metrics.failures.labels("save").inc()
            self._event("failure", f"Version {self.mark.version} could not be saved: {problem}")

    def _changed(self, kind: str, text: str) -> None:
        """An operator's hand was at work: say so, and save it at once."""
        self.versions.acknowledge(self.mark)
        self._save()
        self._show()
        self._event(kind, text)

    def _event(self, kind: str, text: str) -> None:
        log.log(logging.WARNING if kind in ("lost", "failure", "alarm") else logging.INFO, text)
        self.history.event(kind, text)
