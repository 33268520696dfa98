"""``eata predict``: adapt to a stream of one's own images, and write down what the model says of each."""

from __future__ import annotations

import csv
import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from eata.errors import EataError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from eata.adapter import Adapter
    from eata.data.images import FileStream
    from eata.importance import Fisher, Per

HEADER = ["path", "prediction", "class", "confidence", "label", "problem"]
ORDER_SEED = 2020  # of images in class folders: in the order of classes, batch statistics would be those of one class


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
) -> None:
    """Predict images with a model that adapts to them.

    Rows are written as they come. The adaptation state is kept beside them in OUT.state.safetensors: --resume goes on
    from it after Ctrl-C or a crash, and --state takes it to the next stream. Images in class folders are shuffled (seed
    2020), and the accuracy is told; others come in the order of their names.

    Example: eata predict timm/resnet50 --images photos --fisher clean-photos --out predictions.csv
    """
    import eata.models

    if out.suffix not in (".csv", ".parquet"):
        raise EataError(f"{out} is neither a .csv nor a .parquet file.")
    if out.suffix == ".parquet":
        _pyarrow()
    net = eata.models.load(model, weights=weights)
    config: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    job = Job(out, batch, config, _ordered(images))
    saved = job.saved() if resume else None
    job.refuse_to_overwrite(resume)
    before = saved or (None if state is None else _read_state(state))
    adapter = _adapter(net, method, preset, lr, fisher, before, config)
    if before is not None:
        adapter.load_state_dict(before)
    job.run(adapter, saved["predict"] if saved else None, save_every)


class Job:
    """One stream of images, its table of predictions and its state, which always fit together.

    The table is on disk before the state that counts its bytes; after a stop, whatever the table has beyond the state
    is cut off and predicted again, and no row is double or missing.
    """

    def __init__(self, out: Path, batch: int, config: dict[str, Any], order: list[tuple[Path, str]]) -> None:
        self.out = out
        self.table = out if out.suffix == ".csv" else out.with_name(f"{out.name}.rows.csv")
        self.state = out.with_name(f"{out.name}.state.safetensors")
        self.batch = batch
        self.config = config
        self.order = order
        self.folders = sorted({label for _, label in order} - {""})
        names = config.get("label_names")
        self.class_names = [str(name) for name in names or range(int(config["num_classes"]))]

    def saved(self) -> dict[str, Any]:
        """The state to resume from; raises if there is none, or if it is of other images."""
        if not self.state.exists() or not self.table.exists():
            begin = f"remove {self.table}" if self.table.exists() else "leave --resume out"
            missing = self.table if self.state.exists() else self.state
            raise EataError(f"There is nothing to resume, for {missing} is not there: {begin} to begin.")
        found = _read_state(self.state)
        position = found.get("predict")
        if position is None or position["images"] != self._digest(position["files"]):
            raise EataError(f"{self.state} was saved with other images (or in another order); resume with the same.")
        return found

    def refuse_to_overwrite(self, resume: bool) -> None:
        """Raise if there are predictions already and nothing was said about them."""
        if not resume and (self.out.exists() or self.table.exists()):
            there = self.table if self.table.exists() else self.out  # rows of an unfinished .parquet, or a finished one
            remedy = "go on with --resume" if self.table.exists() and self.state.exists() else "remove it"
            raise EataError(f"{there} is there already: {remedy}, or choose another --out.")

    def run(self, adapter: Adapter, position: dict[str, Any] | None, save_every: int) -> None:
        """Predict what is left, from this position."""
        from rich.console import Console

        at = position or {"files": 0, "unread": 0, "bytes": 0, "known": 0, "correct": 0, "images": ""}
        console = Console(stderr=True)
        self.table.parent.mkdir(parents=True, exist_ok=True)
        with self.table.open("r+" if position else "w", newline="", encoding="utf-8") as file:
            file.seek(at["bytes"])
            file.truncate()
            writer = csv.writer(file, lineterminator="\n")
            if not position:
                writer.writerow(HEADER)
            self._save(adapter, file, at)  # now there is something to resume from, whenever the stop comes
            with _progress(console, at["files"], len(self.order)) as advance, _interrupts(console) as interrupted:
                for number, rows in enumerate(self._rows(adapter, at), 1):
                    writer.writerows(rows)
                    file.flush()
                    advance(at["files"])
                    if interrupted():
                        break
                    if number % save_every == 0:
                        self._save(adapter, file, at)
            self._save(adapter, file, at)
        if at["files"] < len(self.order):
            text = f"{at['files']:,} of {len(self.order):,} images are in {self.table}; go on with --resume."
            console.print(text, highlight=False, soft_wrap=True)
            raise KeyboardInterrupt
        if self.out != self.table:
            self._to_parquet()
        self._tell(adapter, at, console)

    def _rows(self, adapter: Adapter, at: dict[str, Any]) -> Iterator[list[list[object]]]:
        """The rows of each batch, with a row for each file that could not be read; ``at`` moves along."""
        stream = self._stream(self.order[at["files"] :])
        for images, _ in stream.batches(self.batch, seed=None, mean=self.config["mean"], std=self.config["std"]):
            confidence, best = adapter(images).softmax(1).max(1)
            yield self._table_rows(list(zip(best.tolist(), confidence.tolist(), strict=True)), dict(stream.skipped), at)
        rest = len(self.order) - at["files"]
        if rest:  # nothing readable came after these
            yield self._table_rows([], dict(stream.skipped), at, rest)

    def _table_rows(
        self, predictions: list[tuple[int, float]], problems: dict[Path, str], at: dict[str, Any], rest: int = 0
    ) -> list[list[object]]:
        rows: list[list[object]] = []
        while predictions or rest:
            path, label = self.order[at["files"]]
            at["files"] += 1
            rest -= bool(rest)
            if path in problems:
                at["unread"] += 1
                rows.append([path, "", "", "", label, problems[path]])
                continue
            best, confidence = predictions.pop(0)
            rows.append([path, best, self.class_names[best], f"{confidence:.6f}", label, ""])
            known = self._number(label)
            at["known"] += known is not None
            at["correct"] += known == best
        return rows

    def _stream(self, order: list[tuple[Path, str]]) -> FileStream:
        from eata.data import images

        files = [path for path, _ in order]
        root = Path(os.path.commonpath([path.parent for path in files])) if files else Path()
        prepare = partial(images.fit, side=int(self.config["input_size"][-1]))
        labels = [images.UNKNOWN] * len(files)
        return images.FileStream("images", (), root, files, labels, prepare, recipe="predict")

    def _number(self, label: str) -> int | None:
        """The model's number for a class folder: by name, or by place where the model's classes have none."""
        if not label:
            return None
        if label in self.class_names:
            return self.class_names.index(label)
        return self.folders.index(label) if len(self.folders) == len(self.class_names) else None

    def _save(self, adapter: Adapter, file: TextIO, at: dict[str, Any]) -> None:
        from eata import state

        file.flush()
        os.fsync(file.fileno())
        at |= {"bytes": self.table.stat().st_size, "images": self._digest(at["files"])}
        state.write(self.state, {**adapter.state_dict(), "predict": at})

    def _digest(self, files: int) -> str:
        text = "\n".join(str(path) for path, _ in self.order[:files])
        return hashlib.sha256(f"{self.batch} {text}".encode(errors="surrogateescape")).hexdigest()[:12]

    def _to_parquet(self) -> None:
        from eata.files import replacing

        arrow_csv, parquet = _pyarrow()
        with replacing(self.out) as temporary:
            parquet.write_table(arrow_csv.read_csv(self.table), temporary)
        self.table.unlink()

    def _tell(self, adapter: Adapter, at: dict[str, Any], console: Console) -> None:
        stats = adapter.stats
        text = f"{at['files']:,} images, {stats.forwards:,} forwards, {stats.backwards:,} backwards in all."
        if at["known"]:
            text += f" Accuracy {100 * at['correct'] / at['known']:.1f} % of {at['known']:,} with a known label."
        elif self.folders:
            text += " No accuracy: the folders' names are not the model's classes."
        if at["unread"]:
            text += f" {at['unread']:,} could not be read: their rows say why."
        console.print(f"{text}\nPredictions: {self.out}\nState: {self.state}", highlight=False, soft_wrap=True)
        if at["unread"] == at["files"]:
            raise EataError(f"None of the images could be read; {self.out} says why.")


def _ordered(places: list[Path]) -> list[tuple[Path, str]]:
    """The images of folders, files and lists, in the order in which they are predicted, each with its class folder."""
    from eata.data import images

    found: list[tuple[Path, str]] = []
    for place in (place.absolute() for place in places):
        if place.is_dir():
            files, labels, names = images.by_subfolder(place)
            found += [(path, names[label] if label >= 0 else "") for path, label in zip(files, labels, strict=True)]
        elif place.is_file() and place.suffix.lower() in images.SUFFIXES:
            found.append((place, ""))
        elif place.is_file():
            found += [(path, "") for path in _listed(place)]
        else:
            raise EataError(f"There is no folder or file {place}.")
    if any(label for _, label in found):
        random.Random(ORDER_SEED).shuffle(found)
    return found


def _listed(file: Path) -> list[Path]:
    """The images that a text file names, one a line; a relative path is seen from the file's folder."""
    try:
        found = [file.parent / line for line in file.read_text("utf-8").split("\n") if line.strip()]
    except UnicodeDecodeError:
        raise EataError(f"{file} is neither an image nor a text file with the path of an image a line.") from None
    if not found:
        raise EataError(f"{file} is empty; it should have the path of an image a line.")
    missing = [path for path in found if not path.is_file()]
    if missing:
        more = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
        raise EataError(f"{file} is read as a list of images, but {missing[0]} is not there{more}.")
    return found


def _adapter(
    net: nn.Module,
    method: str,
    preset: str,
    lr: float | None,
    fisher: Path | None,
    before: dict[str, Any] | None,
    config: dict[str, Any],
) -> Adapter:
    """The method around the net, with the preset that fits the number of classes."""
    import eata
    from eata import methods

    kind = eata.method(method)
    takes = methods.takes(kind)
    name = preset or methods.preset_for(int(config["num_classes"]))
    arguments: dict[str, Any] = dict(eata.preset(name, kind))
    if lr is not None and "lr" in takes:
        arguments["lr"] = lr
    if "fisher" in takes:
        kept = before["memory"].get("importance") if before else None
        arguments["fisher"] = kept or _fisher(net, fisher, config, arguments["per"])
    return kind(net, **arguments)


def _fisher(net: nn.Module, folder: Path | None, config: dict[str, Any], per: Per) -> Fisher:
    import eata
    from eata.importance import BATCH

    if folder is None:
        raise EataError(
            "EATA needs clean images, to know which weights to hold: pass a few hundred with --fisher FOLDER, or take "
            "--method eta, which needs none."
        )
    stream = eata.data.load(f"folder:{folder}", size=int(config["input_size"][-1]))
    return eata.fisher(net, stream.batches(BATCH, mean=config["mean"], std=config["std"]), per=per)


def _read_state(path: Path) -> dict[str, Any]:
    from eata import state

    found: dict[str, Any] = state.read(path)
    return found


def _pyarrow() -> tuple[Any, Any]:
    try:
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet
    except ImportError:
        raise EataError("A .parquet file needs pyarrow: install eata[parquet], or write a .csv file.") from None
    return arrow_csv, parquet


@contextmanager
def _interrupts(console: Console) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, so that the batch in work is finished and kept; pressed again, it stops at once."""
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = before != signal.SIG_IGN  # a background job of a shell is not meant
        signal.signal(signal.SIGINT, before)
        if pressed:
            console.print("finishing the batch in work; Ctrl-C again stops at once", soft_wrap=True)

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
