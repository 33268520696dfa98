"""``eata train``: train a source model, or check that a trained one still does what its record says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eata import origin
from eata.cli.screen import console
from eata.data import cifar10, digits
from eata.device import choose
from eata.errors import EataError
from eata.models import record, zoo
from eata.models import train as training
from eata.models.train import RECIPES, Epoch

SETS: dict[str, ModuleType] = {"cifar10": cifar10, "digits": digits}
SAME_IMAGES = 2  # other threads or processors add in another order, which may tip an image on the edge


def train(
    data: Annotated[str, typer.Option(help=f"Data set: {', '.join(SETS)}.")] = "cifar10",
    model: Annotated[str, typer.Option(help=f"Model: {', '.join(record.KINDS)}.")] = "resnet26-bn",
    recipe: Annotated[
        str | None,
        typer.Option(help=f"Recipe: {', '.join(RECIPES)}; default: short; for the data set digits, its own."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of initial weights, order and augmentation.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the weights; their record goes beside it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from FILE.checkpoint.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Use torch.compile: about 1.3 times as fast, needs a C++ compiler.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: PyTorch's choice.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps; auto: the accelerator if any.")] = "auto",
    amp: Annotated[bool, typer.Option("--amp", help="Mixed precision: faster on a GPU.")] = False,
    check: Annotated[
        str | None, typer.Option(metavar="NAME", help="Train nothing: measure a trained model against its record.")
    ] = None,
) -> None:
    """Train a source model and write its weights with a record of what made them.

    FILE.checkpoint is written after each epoch; after Ctrl-C, the same command with --resume goes on from there and
    ends with the same weights.

    Examples:

        eata train --data digits --out digits.safetensors

        eata train --data cifar10 --model resnet26-bn --recipe short --compile --out bn.safetensors

        eata train --check resnet26-bn-digits
    """
    on = choose(device)
    if threads is not None:
        torch.set_num_threads(threads)
    if check is not None:
        _check(check, on)
        return
    if out is None or out.suffix != ".safetensors":
        raise EataError("Say where the weights go: --out FILE.safetensors.")
    recipe = recipe or ("digits" if data == "digits" else "short")
    if data not in SETS:
        raise EataError(f"There is no data set {data!r} to train on; take one of {', '.join(SETS)}.")
    if recipe not in RECIPES:
        raise EataError(f"There is no recipe {recipe!r}; take one of {', '.join(RECIPES)}.")
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    if checkpoint.exists() and not resume:
        raise EataError(f"{checkpoint} holds an earlier run: add --resume to go on with it, or remove it.")

    train_set, test_set = SETS[data].arrays("train"), SETS[data].arrays("test")
    torch.manual_seed(seed)
    net = record.build(model, len(SETS[data].CLASSES))
    net.to(on).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster; torch lacks the overload
    with _Report(RECIPES[recipe].epochs, len(train_set[0])) as report:
        history = training.train(
            net,
            train_set,
            test_set,
            RECIPES[recipe],
            checkpoint,
            seed=seed,
            flip=data != "digits",  # a mirrored digit is another sign
            compiled=compiled,
            amp=amp,
            resume=resume,
            report=report.epoch,
            tick=report.tick,
        )
    command = f"eata train --data {data} --model {model} --recipe {recipe} --seed {seed}"
    command += f" --threads {threads}" * (threads is not None) + " --compile" * compiled
    command += f" --device {on}" * (on.type != "cpu") + " --amp" * amp + f" --out {out.name}"
    made = record.Record(
        model=model,
        data=data,
        class_names=SETS[data].CLASSES,
        command=command,
        seed=seed,
        recipe=dataclasses.asdict(RECIPES[recipe]),
        commit=origin.commit(),
        torch=torch.__version__,
        error=history[-1].error,
        images=len(test_set[0]),
    )
    record.write(out, net, made)
    console().print(f"{out}: {made.error:.2f} % error on the {made.images} clean test images.")


def _check(name: str, on: torch.device) -> None:
    path = Path(name) if name.endswith(".safetensors") else zoo.WEIGHTS / f"{name}.safetensors"
    net = zoo.load(name).to(on)
    made = record.read(path)
    found = training.error(net, *SETS[made.data].arrays("test"))
    said = f"{name}: {found:.2f} % error measured, {made.error:.2f} % recorded ({made.images} clean test images)."
    console().print(said)
    if abs(found - made.error) > 100 * SAME_IMAGES / made.images + 1e-9:
        raise EataError(f"{name} does not do what its record says.")


class _Report:
    """A progress bar in images, and a line for each epoch."""

    def __init__(self, epochs: int, images: int) -> None:
        self._images = images
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console(errors=True),
        )
        self._task = self._bar.add_task("training", total=epochs * images)

    def __enter__(self) -> _Report:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tick(self, images: int) -> None:
        self._bar.advance(self._task, images)

    def epoch(self, done: Epoch) -> None:
        # sets the bar right after a resume, and for the incomplete batch that an epoch leaves out
        self._bar.update(self._task, completed=done.number * self._images)
        self._bar.console.print(
            f"epoch {done.number}: loss {done.loss:.3f}, test error {done.error:.2f} %, {done.seconds:.0f} s"
        )
