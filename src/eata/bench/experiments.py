"""The paper's experiments, each a short entry: what varies, what stays, which published numbers stand beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eata.data import CORRUPTIONS
from eata.errors import unknown

Setting = float | int | str
NATURAL = "stream"  # the column of data that is shifted by itself, such as ImageNet-R
MIXED = "mixed"  # the column of all corruptions shuffled into one stream


@dataclass(frozen=True)
class Variant:
    """One row of a table (or one point of a curve): a method with its settings.

    Attributes:
        row: its name, also in the published table.
        method: which of ``eata.methods.METHODS``.
        column: where its result goes; None puts each corruption into a column of its own.
        settings: arguments that differ from the preset's, and of the protocol: ``batch``, ``limit``, ``window`` (and
            ``exact``), ``fisher_samples``, ``lr_scale``, ``answers`` (write down what was predicted), ``stream`` (one
            of ``eata.bench.streams``), ``rounds`` (of a lifelong stream), and ``keep`` with ``fraction`` (adapt on part
            of the stream only). A ``budget`` takes the place of the preset's beta.
        lifelong: one stream through all corruptions, never reset.
        slow: 20 to 64 passes an image; only run when asked for.
        net: which of the data's networks: ``"bn"``, or ``"gn"`` (GroupNorm, with TTT's rotation head).
    """

    row: str
    method: str
    column: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    lifelong: bool = False
    slow: bool = False
    net: str = "bn"


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper.

    Attributes:
        name: of the command.
        labels: in ``eata.tex``.
        title: for tables.
        about: what it shows, in a sentence.
        variants: what varies.
        measure: ``"error"`` or ``"accuracy"`` as the paper prints it.
        corruptions: the columns; ``(NATURAL,)`` or ``(MIXED,)`` where there is one stream.
        severities: 1 to 5.
        seeds: of the order.
        clean: when the clean set is measured (while adapting goes on): ``"never"``; at the ``"end"`` of each stream;
            after ``"each"`` corruption, in lifelong streams too, and by a new model before these; to save time, after
            the ``"last"`` corruption only; or ``"around"`` a lifelong stream: by a new model of its own, and at the end
            (elsewhere, after the last).
        plots: which of ``eata.bench.plots``.
        needs_data: the data it is about, where that has to be asked for.
        memory: measure the memory of a step too.
        warm: a step before the clock starts: the first one of a process pays for its memory, a batch's time and more.
        by_model: each model is a column.
    """

    name: str
    labels: tuple[str, ...]
    title: str
    about: str
    variants: tuple[Variant, ...]
    measure: str = "error"
    corruptions: tuple[str, ...] = CORRUPTIONS
    severities: tuple[int, ...] = (5,)
    seeds: tuple[int, ...] = (2020,)
    clean: str = "never"
    plots: tuple[str, ...] = ()
    needs_data: str | None = None
    memory: bool = False
    warm: bool = False
    by_model: bool = False


GAUSSIAN = CORRUPTIONS[:1]
GRADIENT_LIFELONG = tuple(Variant(f"{name}-lifelong", name, lifelong=True) for name in ("tent", "eta", "eata"))
MAIN = (
    Variant("source-gn", "source", slow=True, net="gn"),
    Variant("source-gn-jt", "source", slow=True, net="gn"),
    Variant("ttt", "ttt", slow=True, net="gn"),
    Variant("ttt-episodic", "ttt", settings={"episodic": 1}, slow=True, net="gn"),
    Variant("augment", "augment", settings={"copies_by": "augmix"}, slow=True, net="gn"),
    Variant("augment-crops", "augment", settings={"copies_by": "crops"}, slow=True, net="gn"),
    Variant("memo", "memo", slow=True, net="gn"),
    Variant("source", "source"),
    Variant("bn", "bn", settings={"batch": 256}),
    Variant("tent", "tent"),
    Variant("tent-episodic", "tent", settings={"episodic": 1}, slow=True),
    Variant("eta", "eta"),
    Variant("eata", "eata"),
)
E0 = (0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50, 0.55)
FISHER_SAMPLES = (200, 300, 500, 700, 1000, 1500, 2000, 3000)
# The methods since EATA beside the paper's; CoTTA goes over 32 copies of each image.
FIELD = (
    *(Variant(name, name) for name in ("source", "bn", "tent", "eta", "eata")),
    Variant("eata-come", "eata", settings={"score": "come_entropy"}),
    *(Variant(name, name) for name in ("rdumb", "sar", "deyo", "roid", "lame")),
    Variant("lame-rbf", "lame", settings={"affinity": "rbf"}),
    Variant("cotta", "cotta", slow=True),
    Variant("rotta", "rotta"),
)
STREAMS = ("reset", "continual", "gradual", "mixed", "correlated", "correlated:0.1", "recurring:5")
# How far a model may go from its source: not held, by the paper's term, by a budget in its place.
HELD: tuple[tuple[str, str, dict[str, Setting]], ...] = (
    ("tent", "tent", {}),
    ("eta", "eta", {}),
    ("eata", "eata", {}),
    ("eata-budget", "eata", {"budget": 0.02}),
)
WINDOWS = tuple(
    Variant(f"{method}-window-{length}", method, settings={"batch": 1, "window": length})
    for length in (32, 64)
    for method in ("tent", "eta")
)
# The demo's stream: forgetting takes a long one, and two minutes are short. So it comes three times, and each step is
# twice the paper's; both were chosen on corrupted training images.
LONG: dict[str, Setting] = {"rounds": 3, "lr_scale": 2}
# The textbook's backward, which multiplies zeros, and the one that leaves them out.
BACKWARDS = tuple(
    Variant(f"{method} ({mode})", method, settings={"backward": mode})
    for method in ("tent", "eta", "eata")
    for mode in ("full", "rows")
)
PERCENT = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
SIZES = (256, 512, 1024, 2048, 4096, 10000)

_ALL = (
    Experiment(
        "demo",
        (),
        "One long stream through 15 corruptions",
        "A trained net meets 15 corruptions that it has never seen, three times over, at twice the paper's learning "
        "rate, so that a short stream stands for a long one. It is never reset.",
        (
            *(
                Variant(v.row, v.method, settings={**v.settings, "answers": 1})
                for v in MAIN
                if v.row in ("source", "bn")
            ),
            *(
                Variant(row, method, settings={**settings, **LONG, "answers": 1}, lifelong=True)
                for row, method, settings in HELD
            ),
        ),
        clean="around",
        plots=("methods", "errors", "backwards"),
    ),
    Experiment(
        "imagenet-c",
        ("tab:imagenet-c-level-5", "tab:imagenet-c-levels"),
        "ImageNet-C: error by corruption",
        "15 corruptions, any severities, all methods.",
        (*MAIN, *GRADIENT_LIFELONG),
        clean="end",
        plots=("errors", "backwards", "forgetting"),
        needs_data="imagenet-c:PATH",
    ),
    Experiment(
        "imagenet-r",
        ("tab:imagenet-r",),
        "ImageNet-R: one natural shift",
        "One natural shift, all methods; any folder of shifted images will do.",
        MAIN,
        corruptions=(NATURAL,),
        plots=("backwards",),
        needs_data="imagenet-r:PATH",
    ),
    Experiment(
        "cifar10-c",
        ("tab:cifar-10-c",),
        "CIFAR-10-C: error by corruption",
        "15 corruptions at 5 severities (75 streams), all methods.",
        (*MAIN, *GRADIENT_LIFELONG),
        severities=(1, 2, 3, 4, 5),
        clean="last",
        plots=("errors", "backwards"),
        needs_data="cifar10",
    ),
    Experiment(
        "methods",
        ("not in the paper",),
        "The methods since EATA",
        "All methods, 15 corruptions; any stream with --stream.",
        FIELD,
        plots=("errors", "backwards"),
    ),
    Experiment(
        "streams",
        ("not in the paper",),
        "The streams of the real world",
        "All methods on shuffled, gradual, mixed, correlated and recurring streams, never reset but in the first.",
        tuple(
            Variant(v.row, v.method, name, {**v.settings, "stream": name}, slow=v.slow)
            for v in FIELD
            for name in STREAMS
        ),
        plots=("course",),
    ),
    Experiment(
        "entropy",
        ("fig:selective_entropy_motivation",),
        "Which samples help: lowest or highest entropy",
        "Tent adapts on the p % of lowest or highest entropy; measured on all.",
        tuple(
            Variant(f"{keep} entropy", "tent", str(percent), {"keep": keep, "fraction": percent / 100})
            for keep in ("lowest", "highest")
            for percent in PERCENT
        ),
        "accuracy",
        GAUSSIAN,
        (3,),
        plots=("sweep",),
    ),
    Experiment(
        "forgetting",
        ("fig:imageC-forgetting-level-5", "fig:imageC-forgetting-levels", "fig:imageC-forgetting-levels-each-reset"),
        "Forgetting: corruption and clean accuracy after each corruption",
        "Tent, ETA, EATA and EATA with a budget, reset and lifelong; the clean set after each corruption.",
        tuple(
            Variant(f"{row}-lifelong" if lifelong else row, method, settings=settings, lifelong=lifelong)
            for lifelong in (False, True)
            for row, method, settings in HELD
        ),
        "accuracy",
        clean="each",
        plots=("forgetting",),
    ),
    Experiment(
        "e0",
        ("fig:ablation_e0_fisher_num",),
        "The entropy margin E0",
        "EATA with E0 of 0.20 to 0.55 ln C.",
        tuple(Variant("eata", "eata", f"{e0:.2f}", {"e0": e0}) for e0 in E0),
        "accuracy",
        GAUSSIAN,
        plots=("sweep",),
    ),
    Experiment(
        "fisher-size",
        ("fig:ablation_e0_fisher_num",),
        "The number Q of samples for the Fisher information",
        "EATA with Q of 200 to 3,000, ETA beside it: corruption and clean accuracy.",
        tuple(
            Variant(method, method, str(q), {"fisher_samples": q}) for method in ("eta", "eata") for q in FISHER_SAMPLES
        ),
        "accuracy",
        GAUSSIAN,
        clean="end",
        plots=("sweep",),
    ),
    Experiment(
        "components",
        ("tab:effects_diff_components",),
        "Components of the sample weight S",
        "S = 1 (Tent), S_ent (reliable samples), S (reliable and non-redundant).",
        (
            Variant("s=1", "tent"),
            Variant("s=ent", "eata", settings={"epsilon": 1.0}),  # nothing counts as redundant
            Variant("s=ent*div", "eata"),
        ),
        corruptions=GAUSSIAN,
        severities=(3, 5),
        plots=("backwards",),
    ),
    Experiment(
        "batch-1",
        ("tab:bs=1",),
        "Streams of single samples",
        "Base, Tent and ETA at batch size 1, and over windows of the last 32 and 64 samples.",
        (
            *(Variant(method, method, settings={"batch": 1}) for method in ("source", "tent", "eta")),
            *WINDOWS,
            # all of the window with each image, as the paper does it
            *(Variant(f"{v.row}-exact", v.method, settings={**v.settings, "exact": 1}, slow=True) for v in WINDOWS),
        ),
        "accuracy",
        GAUSSIAN,
        plots=("bars",),
    ),
    Experiment(
        "wall-clock",
        ("section More Discussions",),
        "Wall-clock time",
        "Tent and EATA with the textbook ('full') and the row-sparse ('rows') backward.",
        tuple(variant for variant in BACKWARDS if variant.method != "eta"),
        "accuracy",
        GAUSSIAN,
        plots=("seconds",),
        warm=True,
    ),
    Experiment(
        "memory",
        ("section More Discussions",),
        "Memory of a step",
        "Peak memory of one step of Tent, ETA and EATA, both backward modes: EATA less ETA is the Fisher term's.",
        BACKWARDS,
        "accuracy",
        GAUSSIAN,
        memory=True,
    ),
    Experiment(
        "rows",
        ("not in the paper",),
        "What a faster backward costs",
        "Tent, ETA and EATA with the textbook ('full') and the row-sparse ('rows') backward, and EATA that adapts its "
        "last 8 layers only: the error under 15 corruptions.",
        (*BACKWARDS, Variant("eata (last 8 layers)", "eata", settings={"layers": 8})),
    ),
    Experiment(
        "mixed",
        ("tab:mixed_distribution",),
        "Mixed shifts",
        "The 15 corruptions shuffled into one stream.",
        tuple(Variant(method, method) for method in ("source", "tent", "eata")),
        "accuracy",
        (MIXED,),
        (3, 5),
        plots=("bars",),
    ),
    Experiment(
        "backbones",
        ("tab:big_models",),
        "Other backbones",
        "Source, Tent and EATA with any list of models: --model torchvision/resnet50,torchvision/resnet101.",
        tuple(Variant(method, method) for method in ("source", "tent", "eata")),
        "accuracy",
        GAUSSIAN,
        plots=("bars",),
        by_model=True,
    ),
    Experiment(
        "test-size",
        ("tab:small_testset",),
        "Number of test samples",
        "Tent and EATA on 256 to 10,000 test samples.",
        tuple(Variant(method, method, str(size), {"limit": size}) for method in ("tent", "eata") for size in SIZES),
        "accuracy",
        GAUSSIAN,
        plots=("sweep",),
    ),
    Experiment(
        "learning-rates",
        ("tab:eta_vs_tent_diff_lrs",),
        "Tent at larger learning rates",
        "Tent at 1, 4, 8 and 10 times the rate, and EATA at the rate itself.",
        (
            Variant("eata", "eata"),
            Variant("tent", "tent"),
            *(Variant(f"tent-lr-x{scale}", "tent", settings={"lr_scale": scale}) for scale in (4, 8, 10)),
        ),
        corruptions=GAUSSIAN,
        severities=(3, 5),
        plots=("bars",),
    ),
    Experiment(
        "orders",
        ("tab:mean_and_std",),
        "Random orders",
        "EATA over ten orders of the stream (seeds 2020 to 2029): mean and standard deviation.",
        (Variant("eata", "eata"),),
        "accuracy",
        CORRUPTIONS[:7],
        seeds=tuple(range(2020, 2030)),
    ),
    Experiment(
        "backwards",
        ("fig:imageC-num-backwards2",),
        "Backward passes by corruption and severity",
        "How many samples Tent and ETA go backward on.",
        (Variant("tent", "tent"), Variant("eta", "eta")),
        severities=(1, 2, 3, 4, 5),
        plots=("backwards",),
    ),
)
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}


def find(name: str) -> Experiment:
    """The experiment of this name; an unknown name is an error that says the nearest."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]
