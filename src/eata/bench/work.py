"""One cell's work: a fresh model on one stream."""

from __future__ import annotations

import contextlib
import errno
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import eata
from eata import device, functional, methods, origin
from eata.bench import streams
from eata.bench.experiments import MIXED, find
from eata.bench.materials import Batches, Materials
from eata.bench.memory import peak
from eata.bench.protocol import FISHER_SAMPLES, Cell, Request, Result, Stage
from eata.data import CORRUPTIONS, Stream
from eata.errors import EataError
from eata.files import replacing
from eata.importance import Per

Advance = Callable[[int], None]

SAVE_EVERY = 5000  # images of a stage, after which its state is kept


class Worker:
    """Runs cells of one request.

    Args:
        request: the run's.
        folder: the run's folder, where what cells share and the states between stages are kept.
    """

    def __init__(self, request: Request, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self.materials = Materials(request, folder)
        self.device = self.materials.device

    def adapter(self, cell: Cell) -> Any:
        """The cell's method around a fresh network."""
        method = eata.method(cell.method)
        takes = methods.takes(method)
        net = self.materials.fresh(cell.model)
        arguments: dict[str, Any] = dict(eata.preset(self.materials.preset(cell.model), method))
        index = self.materials.example(cell.model).class_index
        if index is not None and "epsilon" in arguments:  # how alike predictions are depends on the number of classes
            arguments["epsilon"] = eata.preset(methods.preset_for(len(index)))["epsilon"]
        arguments |= {name: value for name, value in cell.settings.items() if name in takes}
        if "score" in arguments:
            arguments["score"] = getattr(functional, str(arguments["score"]))
        if "episodic" in arguments:
            arguments["episodic"] = bool(arguments["episodic"])
        if "lr_scale" in cell.settings:
            arguments["lr"] *= float(cell.settings["lr_scale"])
        if "budget" in arguments:  # in place of the term
            arguments["beta"] = None
        if "fisher" in takes:
            arguments["fisher"] = self.materials.fisher(cell.model, *self._fisher_kind(cell))
        adapter = method(net, **arguments)
        if "window" not in cell.settings:
            return adapter
        return eata.Window(adapter, int(cell.settings["window"]), exact=bool(cell.settings.get("exact")))

    def _fisher_kind(self, cell: Cell) -> tuple[int, Per]:
        """Of how many samples, and how they are squared: as the preset's beta wants it; a budget is in nats."""
        wanted = int(cell.settings.get("fisher_samples", FISHER_SAMPLES))
        per: Per = "sample" if "budget" in cell.settings else eata.preset(self.materials.preset(cell.model))["per"]
        return min(wanted, len(self.materials.clean(cell.model, None))), per

    def run(self, cell: Cell, advance: Advance = lambda images: None) -> Result:
        """The cell's result; what goes wrong inside is recorded in it.

        Args:
            cell: what to run.
            advance: told the number of images after each batch.
        """
        known = {"cell": cell.id, "commit": origin.commit()}
        with _threads(self.request.threads), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="A batch of 1 ")  # the experiment batch-1 is about that
            try:
                if find(self.request.experiment).warm:
                    self._warm(cell)
                adapter = self.adapter(cell)
                return known | {"settings": adapter.settings, "stages": self._stages(cell, adapter, advance)}
            except Exception as problem:  # one bad cell must not end a night's run
                if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise  # all the others would fail with it
                reason = f"{type(problem).__name__}: {problem}"
                return known | {"error": reason, "trace": traceback.format_exc()}

    def _warm(self, cell: Cell) -> None:
        """A step of a model that is thrown away: of the cell's kind, on its first batch."""
        images, _ = next(self.images(cell, cell.stages[0]))
        with self._precision():
            self.adapter(cell)(images.to(self.device))
        device.synchronize(self.device)

    def prepare(self, cells: list[Cell]) -> None:
        """Make the Fisher information that these cells need, each once."""
        needed = {(cell.model, *self._fisher_kind(cell)) for cell in cells if needs_fisher(cell)}
        with _threads(self.request.threads):
            for model, samples, per in sorted(needed):
                with contextlib.suppress(EataError):  # the cells will say what is wrong
                    self.materials.fisher(model, samples, per)

    def _stages(self, cell: Cell, adapter: Any, advance: Advance) -> list[Result]:
        kept = Progress(self.folder / "partial" / cell.id)
        results, unfinished = kept.load(adapter)
        for number, stage in enumerate(cell.stages[len(results) :], len(results)):
            torch.manual_seed(cell.seed + number)  # per stage, so that a resumed stream draws what the whole one drew
            tally = unfinished or new_tally(adapter)
            unfinished = None
            with adapter.frozen() if stage.frozen else contextlib.nullcontext():
                self._stage(cell, stage, adapter, advance, tally, partial(kept.save, adapter, results))
            results.append(finished(tally, stage, adapter, cell.settings))
            if cell.lifelong and number + 1 < len(cell.stages):
                kept.save(adapter, results)
        kept.clear()
        return results

    def _stage(
        self, cell: Cell, stage: Stage, adapter: Any, advance: Advance, tally: Result, save: Callable[[Result], None]
    ) -> None:
        """Go through the stage from where the tally stands, and count."""
        done = tally["samples"]
        advance(done)
        memory: list[int] = tally["memory"]
        for images, labels in islice(self.images(cell, stage), -(-done // cell.batch), None):
            images = images.to(self.device)
            device.synchronize(self.device)
            start = time.perf_counter()
            with peak(memory, self.device, cell.memory and not memory), self._precision():
                logits = adapter(images)
            device.synchronize(self.device)
            tally["seconds"] += time.perf_counter() - start
            best = logits.argmax(1).cpu()
            correct = int((best == labels).sum())
            tally["samples"] += len(labels)
            tally["known"] += int((labels >= 0).sum())
            tally["correct"] += correct
            tally["answers"] += best.tolist() if "answers" in cell.settings else []
            tally["course"] += [[len(labels), correct]] if "stream" in cell.settings else []
            advance(len(labels))
            if tally["samples"] - done >= SAVE_EVERY:
                done = tally["samples"]
                save(tally)

    # --- its images -----------------------------------------------------------------------------------------------

    def images(self, cell: Cell, stage: Stage) -> Batches:
        """Batches of normalized images and labels, in the order in which the stage takes them."""
        if stage.role == "clean":
            return self._batches(self.materials.clean(cell.model, cell.limit), cell)
        if stage.seed is not None:
            return self._part(cell, stage, stage.seed)
        if stage.corruption == MIXED:
            return self._mixed(cell, stage)
        stream = self._stream(cell, stage.corruption, stage.severity)
        if stage.role == "prepare":
            return self._chosen(cell, stream)
        return self._batches(stream, cell)

    def _stream(self, cell: Cell, corruption: str | None, severity: int) -> Stream:
        return self.materials.stream(corruption, severity, cell.limit, False, cell.model)

    def _batches(self, stream: Stream, cell: Cell) -> Batches:
        return self.materials.batches(stream, cell.model, cell.batch, cell.seed)

    def _mixed(self, cell: Cell, stage: Stage) -> Batches:
        """All corruptions in one shuffled stream: streams in random order each, woven together at random."""
        streams = [self._stream(cell, name, stage.severity) for name in CORRUPTIONS]
        singles = [self.materials.batches(one, cell.model, 1, cell.seed + number) for number, one in enumerate(streams)]
        turns = np.repeat(np.arange(len(streams)), [len(one) for one in streams])
        np.random.RandomState(cell.seed).shuffle(turns)
        return rebatched((next(singles[turn]) for turn in turns), cell.batch)

    def _part(self, cell: Cell, stage: Stage, seed: int) -> Batches:
        """A part of a stream, in the order that `eata.bench.streams` says."""
        names = CORRUPTIONS if stage.corruption == MIXED else (stage.corruption,)
        sets = [self._stream(cell, name, stage.severity) for name in names]
        part = streams.Part(tuple((name, stage.severity) for name in names), seed, stage.delta)
        order = streams.order(part, sets[0].labels)
        if len(sets) == 1:
            return self.materials.batches(sets[0], cell.model, cell.batch, seed, order)
        turns, numbers = np.divmod(order, len(sets[0]))
        singles = [
            self.materials.batches(one, cell.model, 1, seed, numbers[turns == turn]) for turn, one in enumerate(sets)
        ]
        return rebatched((next(singles[turn]) for turn in turns), cell.batch)

    def _chosen(self, cell: Cell, stream: Stream) -> Batches:
        """The part of the stream with the lowest or highest entropy under the source model, in the stream's order."""
        source = eata.Source(self.materials.fresh(cell.model))
        with self._precision():
            answers = [
                functional.entropy(source(images.to(self.device))).cpu() for images, _ in self._batches(stream, cell)
            ]
        uncertainty = torch.cat(answers)
        number = round(float(cell.settings["fraction"]) * len(uncertainty))
        chosen = torch.zeros(len(uncertainty), dtype=torch.bool)
        chosen[uncertainty.topk(number, largest=cell.settings["keep"] == "highest").indices] = True
        rows = (pair for images, labels in self._batches(stream, cell) for pair in _singles(images, labels))
        return rebatched((pair for pair, keep in zip(rows, chosen, strict=True) if keep), cell.batch)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        return device.precision(self.device, self.request.amp)


def new_tally(adapter: Any) -> Result:
    """What is counted in a stage, at its start."""
    zero: Result = {"samples": 0, "known": 0, "correct": 0, "seconds": 0.0, "memory": [], "answers": [], "course": []}
    return zero | {"before": asdict(adapter.stats)}


def finished(tally: Result, stage: Stage, adapter: Any, settings: Mapping[str, Any]) -> Result:
    """The result of a stage that is done."""
    place = {"corruption": stage.corruption, "severity": stage.severity, "role": stage.role}
    counted = {name: tally[name] for name in ("samples", "known", "correct")}
    cost = {name: getattr(adapter.stats, name) - value for name, value in tally["before"].items()}
    more = {"memory": tally["memory"][0]} if tally["memory"] else {}
    more |= {"answers": tally["answers"]} if "answers" in settings else {}
    more |= {"course": tally["course"]} if "stream" in settings else {}
    return place | counted | cost | {"seconds": round(tally["seconds"], 4)} | more


class Progress:
    """How far a cell has come: the results of its stages, the tally of the one in work, and the adapter's state then.

    The state is written first and the list of results, which names it, second: the two always belong together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._list = folder / "stages.json"

    def save(self, adapter: Any, results: list[Result], unfinished: Result | None = None) -> None:
        """Keep these, and let go of the ones before."""
        state = self._state(results, unfinished)
        adapter.save(state)
        with replacing(self._list) as temporary:
            temporary.write_text(json.dumps({"stages": results, "unfinished": unfinished}), "utf-8")
        for old in self.folder.glob("*.safetensors"):
            if old != state:
                old.unlink()

    def load(self, adapter: Any) -> tuple[list[Result], Result | None]:
        """The results so far and the tally of the stage in work, with the adapter put where they left it."""
        if not self._list.exists():
            return [], None
        kept = json.loads(self._list.read_text("utf-8"))
        adapter.load(self._state(kept["stages"], kept["unfinished"]))
        return kept["stages"], kept["unfinished"]

    def clear(self) -> None:
        """Nothing to keep any more."""
        for file in self.folder.glob("*") if self.folder.exists() else ():
            file.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.folder.rmdir()

    def _state(self, results: list[Result], unfinished: Result | None) -> Path:
        return self.folder / f"{len(results)}-{unfinished['samples'] if unfinished else 0}.safetensors"


def _singles(images: Tensor, labels: Tensor) -> Batches:
    return ((images[i : i + 1], labels[i : i + 1]) for i in range(len(labels)))


def needs_fisher(cell: Cell) -> bool:
    """Whether the cell's method is held back by the Fisher information."""
    return "fisher" in methods.takes(eata.method(cell.method))


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """A fixed number of threads: sums come out the same to the last bit only if they are split in the same way."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rebatched(parts: Batches, size: int) -> Batches:
    """Batches of ``size`` from smaller ones.

    >>> ones = ((torch.ones(1, 2), torch.tensor([i])) for i in range(5))
    >>> [labels.tolist() for _, labels in rebatched(ones, 2)]
    [[0, 1], [2, 3], [4]]
    """
    while group := list(islice(parts, size)):
        yield torch.cat([images for images, _ in group]), torch.cat([labels for _, labels in group])
