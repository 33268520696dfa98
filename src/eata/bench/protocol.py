"""From a request to its cells: which streams are run, by which method, on which network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from eata import methods
from eata.bench import streams
from eata.bench.experiments import MIXED, NATURAL, Experiment, Setting, Variant, find
from eata.data import CORRUPTIONS
from eata.errors import EataError, unknown

BATCH = 64
FISHER_SAMPLES = 2000

Result = dict[str, Any]  # what a cell gave: its ``stages``, or the ``error`` that ended it

# rough cost of an image against a forward pass: for the order of the cells and the estimate of the time that is left
COST = {"source": 1, "bn": 1, "lame": 1, "augment": 32, "memo": 100, "ttt": 100, "sar": 6, "roid": 5, "cotta": 38}
GRADIENT = 3


@dataclass(frozen=True)
class Traits:
    """What goes with a kind of data: the preset, the published family, the networks, and the clean images."""

    preset: str
    family: str
    nets: Mapping[str, str]
    clean: str | None


_CIFAR10 = Traits(
    "cifar10", "cifar10-c", {"bn": "resnet26-bn-cifar10", "gn": "resnet26-gn-rotation-cifar10"}, clean="cifar10"
)
_IMAGENET = Traits("imagenet", "imagenet-c", {"bn": "torchvision/resnet50"}, clean=None)
TRAITS = {
    "digits": Traits("digits", "digits", {"bn": "resnet26-bn-digits"}, clean="digits"),
    "cifar10-sample": replace(_CIFAR10, family="cifar10-sample", clean="cifar10-sample"),
    "cifar10": _CIFAR10,
    "cifar10-c": _CIFAR10,
    "imagenet": _IMAGENET,
    "imagenet-c": _IMAGENET,
    "imagenet-r": replace(_IMAGENET, family="imagenet-r"),
    "folder": replace(_IMAGENET, family="folder", nets={}),
}


@dataclass(frozen=True)
class Request:
    """What the user asked for; a run is made for exactly this.

    Attributes:
        experiment: name of an experiment.
        data: where the streams come from, such as ``"cifar10"`` or ``"imagenet-c:PATH"``.
        clean: in-distribution images for the clean error and the Fisher information; None: what goes with the data.
        models: networks; none: what goes with the data.
        limit: images a stream; None: all.
        severities: 1 to 5; none: the experiment's.
        methods: rows or methods; none: all but the slow ones.
        seeds: of the order; none: the experiment's.
        batch: images a batch; None: 64, and 256 for BN, as in the paper.
        stream: how the shifts follow one another, as ``eata.bench.streams`` names it; None: the experiment's way. Of an
            experiment that compares streams: those to run, with commas.
        backward: ``"full"``, ``"rows"`` or ``"auto"``, of the methods that take it; None: the experiment's.
        threads: of a cell. Part of the request because it decides the last bits of the results.
        device: that the cells run on, such as ``"cpu"`` or ``"cuda:1"``; likewise.
        amp: mixed precision; likewise.
    """

    experiment: str
    data: str
    clean: str | None = None
    models: tuple[str, ...] = ()
    limit: int | None = None
    severities: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    batch: int | None = None
    stream: str | None = None
    backward: str | None = None
    threads: int = 1
    device: str = "cpu"
    amp: bool = False

    @property
    def traits(self) -> Traits:
        """What goes with the data."""
        kind = self.data.partition(":")[0]
        if kind not in TRAITS:
            raise unknown("data set", kind, TRAITS)
        return TRAITS[kind]

    @property
    def clean_data(self) -> str | None:
        """Where the clean images come from, if there are any."""
        if self.clean:
            return self.clean
        return self.data if self.data.startswith("imagenet:") else self.traits.clean

    def net(self, kind: str) -> str:
        """The network of this kind (``"bn"`` or ``"gn"``); the user's own serves for both."""
        known = self.traits.nets
        if self.models:
            return self.models[0]
        if not known:
            raise EataError(f"Which model is to be adapted to {self.data}? Name it with --model.")
        return known.get(kind, known["bn"])


@dataclass(frozen=True)
class Stage:
    """One pass over one set of images.

    Attributes:
        corruption: None for the images as they are, ``"mixed"`` for all corruptions in one stream.
        severity: of the corruption.
        role: ``"shift"``: measured as the column's result; ``"clean"``: measured as the clean result; ``"prepare"``:
            adapts only, on the part of the stream that the cell's ``keep`` and ``fraction`` say.
        frozen: predict only.
        seed: of a part of one of ``eata.bench.streams``; None: shuffled by the cell's, as in the paper.
        delta: of such a part.
    """

    corruption: str | None
    severity: int
    role: Literal["shift", "clean", "prepare"] = "shift"
    frozen: bool = False
    seed: int | None = None
    delta: float | None = None


@dataclass(frozen=True)
class Cell:
    """One stream from a fresh model: the unit of work, of storage and of failure."""

    row: str
    column: str | None
    method: str
    model: str
    severity: int
    seed: int
    batch: int
    limit: int | None
    stages: tuple[Stage, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    memory: bool = False

    @property
    def id(self) -> str:
        """A readable name with a hash of everything that the result depends on."""
        where = self.column or (self.stages[0].corruption if len(self.stages) <= 2 else "lifelong")
        words = f"{self.row} {where or NATURAL} {self.severity} {self.seed}"
        return f"{slug(words)}-{digest(_without_none_of_streams(asdict(self)))}"

    @property
    def lifelong(self) -> bool:
        """Whether the stream goes through several shifts, so that its state is worth keeping between them."""
        return len(self.stages) > 2

    @property
    def cost(self) -> int:
        """Of an image, in forward passes, roughly."""
        return COST.get(self.method, GRADIENT)

    def effort(self, images: int) -> float:
        """Of the whole cell, in forward passes of one image, roughly.

        Args:
            images: in a stream.
        """
        streams = sum(len(CORRUPTIONS) if stage.corruption == MIXED else 1 for stage in self.stages)
        return float(min(images, self.limit or images) * streams * self.cost)


def _without_none_of_streams(cell: dict[str, Any]) -> dict[str, Any]:
    """What came with streams changes no name of a cell that is none."""
    new = ("seed", "delta")
    stages = [{name: v for name, v in stage.items() if name not in new or v is not None} for stage in cell["stages"]]
    return {**cell, "stages": stages}


def slug(text: str) -> str:
    """The text as part of a file's name on every system.

    >>> slug("own:net 5")
    'own-net-5'
    """
    return "".join(letter if letter.isalnum() else "-" for letter in text)


def digest(value: Any) -> str:
    """Short hash of plain data.

    >>> digest({"a": 1}) == digest({"a": 1}) != digest({"a": 2})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=dict).encode()).hexdigest()[:10]


def plan(request: Request, available: int) -> list[Cell]:
    """The cells of a request, in the order that lets methods share a stream.

    Args:
        request: what to run.
        available: images in a stream of this data; sizes beyond it, or beyond the request's limit, are left out.
    """
    experiment = find(request.experiment)
    if request.stream is not None:
        for name in request.stream.split(","):
            streams.parse(name)  # before anything is fetched
        if experiment.by_model or not set(experiment.corruptions) <= set(CORRUPTIONS):
            raise EataError(f"{experiment.name} has a stream of its own; --stream is for experiments on corruptions.")
    if len(request.models) > 1 and not experiment.by_model:
        raise EataError(f"{experiment.name} takes one model, not {len(request.models)}; several are for 'backbones'.")
    if request.backward not in (None, "auto", "rows", "full"):
        raise EataError(f"There is no backward {request.backward!r}; there are auto, rows and full.")
    if request.backward and any("backward" in variant.settings for variant in experiment.variants):
        raise EataError(f"{experiment.name} compares one backward with another by itself; leave out --backward.")
    for severity in request.severities:
        if severity not in range(1, 6):
            raise EataError(f"There is no severity {severity}; there are 1 (slight) to 5 (severe).")
    cells = [
        cell
        for severity in request.severities or experiment.severities
        for seed in request.seeds or experiment.seeds
        for variant in _chosen(experiment, request)
        if _fits(variant, available, request.limit) and not (request.stream and variant.lifelong)
        for cell in _cells(experiment, request, variant, severity, seed)
    ]
    order = [stage.corruption for cell in cells for stage in cell.stages]

    def by_stream(cell: Cell) -> tuple[bool, int, int, int]:
        return cell.lifelong, cell.severity, cell.seed, order.index(cell.stages[0].corruption)

    return sorted(cells, key=by_stream)


def _chosen(experiment: Experiment, request: Request) -> list[Variant]:
    variants = _of_streams(experiment.variants, request.stream)
    names = {name: None for variant in variants for name in (variant.row, variant.method)}
    if request.methods == ("all",):
        return list(variants)
    for name in request.methods:
        if name not in names:
            raise unknown("method", name, tuple(names))
    if request.methods:
        rows = {variant.row for variant in variants}
        return [
            v for v in variants if v.row in request.methods or (v.method in request.methods and v.method not in rows)
        ]
    return [variant for variant in variants if not variant.slow]


def _of_streams(variants: tuple[Variant, ...], wanted: str | None) -> tuple[Variant, ...]:
    """Of variants that have a stream each, those of the wanted ones; of others, all."""
    known = {str(v.settings["stream"]): None for v in variants if "stream" in v.settings}
    if not known or wanted is None:
        return variants
    names = [streams.parse(name).name for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise unknown("stream in this experiment", name, known, "'eata bench methods' takes any.")
    return tuple(v for v in variants if v.settings["stream"] in names)


def _fits(variant: Variant, available: int, limit: int | None) -> bool:
    """Whether there are images enough for the sizes that the variant is named after."""
    size, samples = (int(variant.settings.get(name, 0)) for name in ("limit", "fisher_samples"))
    return size <= min(available, limit or available) and samples <= available


def _cells(experiment: Experiment, request: Request, variant: Variant, severity: int, seed: int) -> list[Cell]:
    settings = dict(variant.settings)
    if request.stream is not None and "stream" not in settings:
        settings["stream"] = streams.parse(request.stream).name
    if request.backward is not None and "backward" in methods.takes(methods.METHODS[variant.method]):
        settings["backward"] = request.backward
    limits = [int(limit) for limit in (settings.pop("limit", None), request.limit) if limit is not None]
    batch, rounds = int(settings.pop("batch", BATCH)), int(settings.pop("rounds", 1))
    cell = Cell(
        row=variant.row,
        column=variant.column,
        method=variant.method,
        model=request.net(variant.net),
        severity=severity,
        seed=seed,
        batch=batch if batch == 1 else request.batch or batch,
        limit=min(limits, default=None),
        stages=(),
        settings=settings,
        memory=experiment.memory,
    )
    if experiment.by_model:
        models = request.models or (cell.model,)
        (corruption,) = experiment.corruptions
        return [
            replace(cell, model=model, column=model.rpartition("/")[2], stages=(Stage(corruption, severity),))
            for model in models
        ]
    can_measure_clean = request.clean_data is not None
    clean = (Stage(None, severity, "clean"),) if can_measure_clean else ()
    shifts = [Stage(None if name == NATURAL else name, severity) for name in experiment.corruptions]
    if "stream" in settings:
        return _streamed(cell, experiment)
    if "keep" in settings:
        return [replace(cell, stages=(replace(s, role="prepare"), replace(s, frozen=True))) for s in shifts]
    if variant.lifelong:
        before = [replace(cell, stages=clean)] if clean and experiment.clean in ("around", "each") else []
        # each round in an order of its own; the last in that of the methods that go through the images once
        early = (replace(shift, seed=seed + turn) for turn in range(1, rounds) for shift in shifts)
        whole = (*early, *shifts, *clean)
        if experiment.clean == "each":
            whole = tuple(stage for shift in shifts for stage in (shift, *clean))
        return [*before, replace(cell, stages=whole)]
    then = {"never": [], "last": shifts[-1:], "around": shifts[-1:]}.get(experiment.clean, shifts)
    return [replace(cell, stages=(shift, *(clean if shift in then else ()))) for shift in shifts]


def _streamed(cell: Cell, experiment: Experiment) -> list[Cell]:
    """The cells of a stream: one for each part where the model is reset, else one."""
    recipe = streams.parse(str(cell.settings["stream"]))
    found = [
        Stage(
            part.shifts[0][0] if len(part.shifts) == 1 else MIXED, part.shifts[0][1], seed=part.seed, delta=part.delta
        )
        for part in streams.parts(recipe, experiment.corruptions, cell.severity, cell.seed)
    ]
    if recipe.shift == "reset":
        return [replace(cell, stages=(stage,)) for stage in found]
    return [replace(cell, stages=tuple(found))]
