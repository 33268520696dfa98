"""``eata predict``: adapt to a stream of one's own images, and write down what the model says of each."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eata.errors import EataError

if TYPE_CHECKING:
    from rich.console import Console

    from eata.adapter import Adapter
    from eata.predictions import Job, Position


def predict(
    model: Annotated[
        str, typer.Argument(help="Ours, timm/NAME, torchvision/NAME, or package.module:factory for your own.")
    ],
    images: Annotated[
        list[Path], typer.Option(help="A folder, an image, or a text file with a path a line; may be given again.")
    ],
    out: Annotated[Path, typer.Option(help="Where predictions go: .csv, or .parquet (which needs eata[parquet]).")],
    method: Annotated[str, typer.Option(help="source, bn, tent, eta or eata.")] = "eata",
    weights: Annotated[Path | None, typer.Option(help="Weights for the model: .safetensors, .pth or .pt.")] = None,
    fisher: Annotated[
        Path | None, typer.Option(help="For eata: a folder of a few hundred clean images like the training data.")
    ] = None,
    preset: Annotated[str, typer.Option(help="imagenet, cifar10 or digits; default: by the number of classes.")] = "",
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: the preset's.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images a batch.")] = 64,
    state: Annotated[Path | None, typer.Option(help="Go on from this adaptation state, of an earlier stream.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Save the adaptation state every so many batches.")] = 20,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stream that was stopped.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps; auto: the accelerator if any.")] = "auto",
    amp: Annotated[bool, typer.Option("--amp", help="Mixed precision: faster on a GPU.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share each batch; on the CPU.")] = 1,
) -> None:
    """Predict images with a model that adapts to them.

    Rows are written as they come. The adaptation state is kept beside them in OUT.state.safetensors: --resume goes on
    from it after Ctrl-C or a crash, and --state takes it to the next stream. Images in class folders are shuffled (seed
    2020), and the accuracy is told; others come in the order of their names. With --processes, all of them
    learn together, from the same batches in the same order, by the textbook gradient (backward="full").

    Example: eata predict timm/resnet50 --images photos --fisher clean-photos --out predictions.csv
    """
    import eata.models
    from eata import arguments
    from eata import state as states
    from eata.cli.screen import console as screen
    from eata.crew import Crew
    from eata.device import choose
    from eata.predictions import Job, ordered

    on = choose("cpu" if processes > 1 and device == "auto" else device)
    if processes > 1 and on.type != "cpu":
        raise EataError(
            f"--processes works on the CPU, not on {on}; for several GPUs, start a program of your own with torchrun, "
            "and call eata.parallel in it."
        )
    eata.method(method)  # a slip of the pen is told before a model is loaded
    net = eata.models.load(model, weights=weights).to(on)
    config: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    job = Job(out, ordered(images), batch, config, on, amp)
    saved = job.saved() if resume else None
    if not resume:
        job.refuse_to_overwrite()
    before = saved or (None if state is None else states.read(state))
    kept = before["memory"].get("importance") if before else None
    given = arguments.of(net, method, preset=preset, lr=lr, fisher=fisher, kept=kept, on=on)
    adapter = eata.method(method)(net, **given)
    if before is not None:
        adapter.load_state_dict(before)
    console = screen(errors=True)
    position = saved["predict"] if saved else None
    done = position["files"] if position else 0
    build = partial(_built, model, weights, method, given)
    with (
        Crew(adapter, build, processes) if processes > 1 else nullcontext(adapter) as working,
        _progress(console, done, len(job.order)) as advance,
        _interrupts(console) as stopped,
    ):
        at = job.run(working, position, save_every=save_every, advance=advance, stopped=stopped)
    _tell(console, job, adapter, at)


def _built(model: str, weights: Path | None, method: str, arguments: dict[str, Any]) -> Adapter:
    """The same adapter in another process."""
    import eata.models

    return eata.method(method)(eata.models.load(model, weights=weights), **arguments)


def _tell(console: Console, job: Job, adapter: Adapter, at: Position) -> None:
    """What became of the stream."""
    if at["files"] < len(job.order):
        console.print(f"{at['files']:,} of {len(job.order):,} images are in {job.table}; go on with --resume.")
        raise KeyboardInterrupt
    stats = adapter.stats
    text = f"{at['files']:,} images, {stats.forwards:,} forwards, {stats.backwards:,} backwards in all."
    if at["known"]:
        text += f" Accuracy {100 * at['correct'] / at['known']:.1f} % of {at['known']:,} with a known label."
    elif job.folders:
        text += " No accuracy: the folders' names are not the model's classes."
    if at["unread"]:
        text += f" {at['unread']:,} could not be read: their rows say why."
    console.print(f"{text}\nPredictions: {job.out}\nState: {job.state}")
    if at["unread"] == at["files"]:
        raise EataError(f"None of the images could be read; {job.out} says why.")


@contextmanager
def _interrupts(console: Console) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, so that the batch in work is finished and kept; pressed again, it stops at once."""
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = before != signal.SIG_IGN  # a background job of a shell is not meant
        signal.signal(signal.SIGINT, before)
        if pressed:
            console.print("finishing the batch in work; Ctrl-C again stops at once")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(console: Console, done: int, total: int) -> Iterator[Callable[[int], None]]:
    """A bar in a terminal, nothing in a pipe; moved to the number of images that are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=total, completed=done)
        yield lambda files: bar.update(task, completed=files)
