"""One cell's work: a fresh model on one stream. What cells share (streams, networks, Fisher) is made once."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import eata
from eata import methods, state
from eata.bench.experiments import MIXED
from eata.bench.protocol import FISHER_SAMPLES, Cell, Request, Stage
from eata.data import CORRUPTIONS, Stream
from eata.errors import EataError
from eata.files import replacing
from eata.functional import entropy
from eata.importance import Fisher

Batches = Iterator[tuple[Tensor, Tensor]]
Result = dict[str, Any]
Advance = Callable[[int], None]

STREAMS_KEPT = 16  # the 15 corruptions of one severity and the clean set: about 0.5 GB for CIFAR-10


class Worker:
    """Runs cells of one request.

    Args:
        request: the run's.
        folder: the run's folder, where the Fisher information and the states between stages are kept; may be set later,
            before the first cell is run.
    """

    def __init__(self, request: Request, folder: Path | None = None) -> None:
        self.request = request
        self.folder = folder or Path()
        self.stream = lru_cache(STREAMS_KEPT)(self._stream)
        self.net = lru_cache(maxsize=None)(self._net)
        self.fisher = lru_cache(maxsize=None)(self._fisher)

    # --- what cells share -----------------------------------------------------------------------------------------

    def _stream(self, corruption: str | None, severity: int, limit: int | None, clean: bool, size: int) -> Stream:
        spec = self.request.clean_data if clean else self.request.data
        if spec is None:
            raise EataError(
                f"Clean images are needed beside {self.request.data}; name them, such as --clean imagenet:PATH."
            )
        return eata.data.load(spec, corruption=corruption, severity=severity, limit=limit, size=size)

    def _net(self, name: str) -> nn.Module:
        return eata.models.load(name).eval()

    def _config(self, name: str) -> dict[str, Any]:
        config: Any = self.net(name).pretrained_cfg
        return dict(config)

    def _size(self, name: str) -> int:
        return int(self._config(name)["input_size"][-1])

    def _clean(self, name: str, limit: int | None) -> Stream:
        return self.stream(None, 0, limit, True, self._size(name))

    def _fisher(self, name: str, samples: int) -> Fisher:
        """From the run's folder if it is there, so that several processes and later runs do it once."""
        per = eata.preset(self._preset(name))["per"]
        path = self.folder / "fisher" / f"{name.replace('/', '-')}-{samples}-{per}.safetensors"
        if path.exists():
            return Fisher(state.read(path), per)
        net = self._fresh(name)
        batches = self._batches(self._clean(name, None), name, 64, 2020)
        omega = eata.fisher(net, islice(batches, -(-samples // 64)), samples=samples, per=per)
        state.write(path, omega)
        return omega

    def _fresh(self, name: str) -> nn.Module:
        net = copy.deepcopy(self.net(name))
        index = self._example(name).class_index
        return net if index is None else Restricted(net, index)

    def _example(self, name: str) -> Stream:
        """A stream of the request's data, for what all of them have in common."""
        kind = self.request.data.partition(":")[0]
        corruption = CORRUPTIONS[0] if kind == "imagenet-c" else None
        severity = (self.request.severities or (5,))[0]
        stream = self.stream(corruption, severity, None, False, self._size(name))
        if not stream.class_names:
            raise EataError(
                f"{self.request.data} has no labels to measure with: sort its images into a folder a class, or see "
                "'eata predict', which needs none."
            )
        stream.require(self._config(name)["num_classes"])
        return stream

    def available(self, name: str) -> int:
        """Images in a stream; raises if the model does not fit the data."""
        return len(self._example(name))

    def digests(self, name: str) -> tuple[str, str]:
        """Hashes of the network's weights and of the data."""
        weights = self.net(name).state_dict().items()
        return state.digest(weights), self._example(name).digest

    @cached_property
    def generated(self) -> bool:
        """Whether the corruptions are made here instead of read from the published files."""
        kind = self.request.data.partition(":")[0]
        if kind in ("imagenet-c", "imagenet-r"):
            return False
        if kind == "cifar10-c":
            return self.stream(CORRUPTIONS[0], 5, 1, False, 32).generated
        return True

    # --- a cell ---------------------------------------------------------------------------------------------------

    def adapter(self, cell: Cell) -> Any:
        """The cell's method around a fresh network."""
        method = eata.method(cell.method)
        takes = methods.takes(method)
        net = self._fresh(cell.model)
        arguments: dict[str, Any] = dict(eata.preset(self._preset(cell.model), method))
        arguments |= {name: value for name, value in cell.settings.items() if name in takes}
        if "episodic" in arguments:
            arguments["episodic"] = bool(arguments["episodic"])
        if "lr_scale" in cell.settings:
            arguments["lr"] *= float(cell.settings["lr_scale"])
        if "fisher" in takes:
            arguments["fisher"] = self.fisher(cell.model, self._fisher_samples(cell))
        adapter = method(net, **arguments)
        return eata.Window(adapter, length=int(cell.settings["window"])) if "window" in cell.settings else adapter

    def _fisher_samples(self, cell: Cell) -> int:
        wanted = int(cell.settings.get("fisher_samples", FISHER_SAMPLES))
        return min(wanted, len(self._clean(cell.model, None)))

    def _preset(self, model: str) -> str:
        if not self.request.data.startswith("folder:"):
            return self.request.traits.preset
        return methods.preset_for(self._config(model)["num_classes"])

    def run(self, cell: Cell, advance: Advance = lambda images: None) -> Result:
        """The cell's result; what goes wrong inside is recorded in it.

        Args:
            cell: what to run.
            advance: told the number of images after each batch.
        """
        with _threads(self.request.threads), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="A batch of 1 ")  # the experiment batch-1 is about that
            try:
                return {"cell": cell.id, "stages": self._stages(cell, advance)}
            except Exception as problem:  # one bad cell must not end a night's run
                if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise  # all the others would fail with it
                reason = f"{type(problem).__name__}: {problem}"
                return {"cell": cell.id, "error": reason, "trace": traceback.format_exc()}

    def prepare(self, cells: list[Cell]) -> None:
        """Make the Fisher information that these cells need, each once."""
        needed = {(cell.model, self._fisher_samples(cell)) for cell in cells if needs_fisher(cell)}
        with _threads(self.request.threads):
            for model, samples in sorted(needed):
                with contextlib.suppress(EataError):  # the cells will say what is wrong
                    self.fisher(model, samples)

    def _stages(self, cell: Cell, advance: Advance) -> list[Result]:
        adapter = self.adapter(cell)
        kept = Progress(self.folder / "partial" / cell.id)
        results = kept.load(adapter) if cell.lifelong else []
        for number, stage in enumerate(cell.stages[len(results) :], len(results)):
            torch.manual_seed(cell.seed + number)  # per stage, so that a resumed stream draws what the whole one drew
            results.append(self._stage(cell, stage, adapter, advance))
            if cell.lifelong and number + 1 < len(cell.stages):
                kept.save(adapter, results)
        kept.clear()
        return results

    def _stage(self, cell: Cell, stage: Stage, adapter: Any, advance: Advance) -> Result:
        before = copy.copy(adapter.stats)
        counted = {"samples": 0, "known": 0, "correct": 0}
        seconds, memory = 0.0, list[int]()
        with adapter.frozen() if stage.frozen else contextlib.nullcontext():
            for images, labels in self._images(cell, stage):
                start = time.perf_counter()
                with peak_memory(memory, wanted=cell.memory and not memory):
                    logits = adapter(images)
                seconds += time.perf_counter() - start
                counted["samples"] += len(labels)
                counted["known"] += int((labels >= 0).sum())
                counted["correct"] += int((logits.argmax(1) == labels).sum())
                advance(len(labels))
        cost = {name: getattr(adapter.stats, name) - getattr(before, name) for name in vars(before)}
        place = {"corruption": stage.corruption, "severity": stage.severity, "role": stage.role}
        return place | counted | cost | {"seconds": round(seconds, 4)} | ({"memory": memory[0]} if memory else {})

    # --- its images -----------------------------------------------------------------------------------------------

    def _images(self, cell: Cell, stage: Stage) -> Batches:
        if stage.role == "clean":
            return self._batches(self._clean(cell.model, cell.limit), cell.model, cell.batch, cell.seed)
        if stage.corruption == MIXED:
            return self._mixed(cell, stage)
        stream = self.stream(stage.corruption, stage.severity, cell.limit, False, self._size(cell.model))
        if stage.role == "prepare":
            return self._chosen(cell, stream)
        return self._batches(stream, cell.model, cell.batch, cell.seed)

    def _batches(self, stream: Stream, model: str, batch: int, seed: int) -> Batches:
        config = self._config(model)
        return stream.batches(batch, seed=seed, mean=config["mean"], std=config["std"])

    def _mixed(self, cell: Cell, stage: Stage) -> Batches:
        """All corruptions in one shuffled stream: streams in random order each, woven together at random."""
        size = self._size(cell.model)
        streams = [self.stream(name, stage.severity, cell.limit, False, size) for name in CORRUPTIONS]
        singles = [self._batches(one, cell.model, 1, cell.seed + number) for number, one in enumerate(streams)]
        turns = np.repeat(np.arange(len(streams)), [len(one) for one in streams])
        np.random.RandomState(cell.seed).shuffle(turns)
        return rebatched((next(singles[turn]) for turn in turns), cell.batch)

    def _chosen(self, cell: Cell, stream: Stream) -> Batches:
        """The part of the stream with the lowest or highest entropy under the source model, in the stream's order."""
        source = eata.Source(self._fresh(cell.model))

        def ordered() -> Batches:
            return self._batches(stream, cell.model, cell.batch, cell.seed)

        uncertainty = torch.cat([entropy(source(images)) for images, _ in ordered()])
        number = round(float(cell.settings["fraction"]) * len(uncertainty))
        chosen = torch.zeros(len(uncertainty), dtype=torch.bool)
        chosen[uncertainty.topk(number, largest=cell.settings["keep"] == "highest").indices] = True
        rows = (pair for images, labels in ordered() for pair in _singles(images, labels))
        return rebatched((pair for pair, keep in zip(rows, chosen, strict=True) if keep), cell.batch)


class Restricted(nn.Module):
    """A network whose logits are those of some classes only (ImageNet-R: 200 of 1,000), before entropy and argmax."""

    def __init__(self, net: nn.Module, index: tuple[int, ...]) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("index", torch.tensor(index), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits[:, self.index]  # type: ignore[index]


class Progress:
    """How far a lifelong stream has come: the results of its stages so far, and the adapter's state after them.

    The state is written first and the list of results, which names it, second: the two always belong together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._list = folder / "stages.json"

    def save(self, adapter: Any, results: list[Result]) -> None:
        """Keep these, and let go of the ones before."""
        adapter.save(self._state(len(results)))
        with replacing(self._list) as temporary:
            temporary.write_text(json.dumps(results))
        self._state(len(results) - 1).unlink(missing_ok=True)

    def load(self, adapter: Any) -> list[Result]:
        """The results so far, with the adapter put where they left it."""
        if not self._list.exists():
            return []
        results: list[Result] = json.loads(self._list.read_text())
        adapter.load(self._state(len(results)))
        return results

    def clear(self) -> None:
        """Nothing to keep any more."""
        for file in self.folder.glob("*") if self.folder.exists() else ():
            file.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.folder.rmdir()

    def _state(self, stages: int) -> Path:
        return self.folder / f"{stages}.safetensors"


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


@contextlib.contextmanager
def peak_memory(found: list[int], wanted: bool) -> Iterator[None]:
    """Append to ``found`` the bytes that the block takes at its peak, beyond what is there before it, if ``wanted``.

    On the CPU they come from the allocator's own record of what it gave and took back.
    """
    if not wanted:
        yield
    elif torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        found.append(torch.cuda.max_memory_allocated() - before)
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each start and stop is a line on the user's screen
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            yield
        events: Any = record.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        found.append(max(accumulate(size for _, size in changes)))
