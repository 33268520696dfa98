"""A stream of image files and the table of what a model says of each; stopped at any time, it goes on where it was."""

from __future__ import annotations

import csv
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from eata import device, state
from eata.adapter import Adapter
from eata.data import images
from eata.errors import EataError
from eata.extras import need
from eata.files import replacing

HEADER = ["path", "prediction", "class", "confidence", "label", "problem"]
ORDER_SEED = 2020  # of images in class folders: in the order of classes, batch statistics would be those of one class

Order = list[tuple[Path, str]]
Position = dict[str, Any]


def ordered(places: Sequence[Path]) -> Order:
    """The images of folders, files and lists, in the order in which they are predicted, each with its class folder.

    Args:
        places: each a folder, an image, or a text file with the path of an image a line. Images in class folders are
            shuffled; others come in the order of their names.
    """
    found: Order = []
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
    content = file.read_bytes()
    if b"\0" in content:
        raise EataError(f"{file} is neither an image nor a text file with the path of an image a line.")
    found = [file.parent / os.fsdecode(line) for line in content.splitlines() if line.strip()]
    if not found:
        raise EataError(f"{file} is empty; it should have the path of an image a line.")
    missing = [path for path in found if not path.is_file()]
    if missing:
        more = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
        raise EataError(f"{file} is read as a list of images, but {missing[0]} is not there{more}.")
    return found


class Job:
    """One stream of images, its table of predictions and its state, which always fit together.

    The table is on disk before the state that counts its bytes; after a stop, whatever the table has beyond the state
    is cut off and predicted again, and no row is double or missing.

    Args:
        out: where predictions go: .csv, or .parquet (which needs pyarrow).
        order: the images, each with its class folder; see :func:`ordered`.
        batch: images a batch.
        config: of the network: ``net.pretrained_cfg``.
        on: device of the network.
        amp: mixed precision.
    """

    def __init__(
        self,
        out: Path,
        order: Order,
        batch: int,
        config: Mapping[str, Any],
        on: torch.device | None = None,
        amp: bool = False,
    ) -> None:
        if out.suffix not in (".csv", ".parquet"):
            raise EataError(f"{out} is neither a .csv nor a .parquet file.")
        if out.suffix == ".parquet":
            _pyarrow()
        self.out = out
        self.table = out if out.suffix == ".csv" else out.with_name(f"{out.name}.rows.csv")
        self.state = out.with_name(f"{out.name}.state.safetensors")
        self.order = order
        self.batch = batch
        self.config = config
        self.on = on or torch.device("cpu")
        self.amp = amp
        self.folders = sorted({label for _, label in order} - {""})
        names = config.get("label_names")
        self.class_names = [str(name) for name in names or range(int(config["num_classes"]))]
        self._hash, self._hashed = hashlib.sha256(f"{batch} ".encode()), 0

    def saved(self) -> dict[str, Any]:
        """The state to resume from; raises if there is none, or if it is of other images."""
        if not self.state.exists() or not self.table.exists():
            begin = f"remove {self.table}" if self.table.exists() else "leave --resume out"
            missing = self.table if self.state.exists() else self.state
            raise EataError(f"There is nothing to resume, for {missing} is not there: {begin} to begin.")
        found: dict[str, Any] = state.read(self.state)
        position = found.get("predict")
        if position is None or position["images"] != self._digest(position["files"]):
            raise EataError(f"{self.state} was saved with other images (or in another order); resume with the same.")
        return found

    def refuse_to_overwrite(self) -> None:
        """Raise if there are predictions already."""
        if self.out.exists() or self.table.exists():
            there = self.table if self.table.exists() else self.out  # rows of an unfinished .parquet, or a finished one
            remedy = "go on with --resume" if self.table.exists() and self.state.exists() else "remove it"
            raise EataError(f"{there} is there already: {remedy}, or choose another --out.")

    def run(
        self,
        adapter: Adapter,
        position: Position | None = None,
        *,
        save_every: int = 20,
        advance: Callable[[int], None] = lambda files: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Position:
        """Predict what is left, from this position; gives the position at the end.

        Args:
            adapter: around the network, in the state that belongs to the position.
            position: None begins.
            save_every: so many batches.
            advance: told the number of files that are done after each batch.
            stopped: asked after each batch; True ends it there, with everything saved.
        """
        at = position or {"files": 0, "unread": 0, "bytes": 0, "known": 0, "correct": 0, "images": ""}
        self.table.parent.mkdir(parents=True, exist_ok=True)
        # names of files may be any bytes; the table is UTF-8, or else no program reads it
        mode = "r+" if position else "w"
        with self.table.open(mode, newline="", encoding="utf-8", errors="backslashreplace") as file:
            file.seek(at["bytes"])
            file.truncate()
            writer = csv.writer(file, lineterminator="\n")
            if not position:
                writer.writerow(HEADER)
            self._save(adapter, file, at)  # now there is something to resume from, whenever the stop comes
            for number, rows in enumerate(self._rows(adapter, at), 1):
                writer.writerows(rows)
                file.flush()
                advance(at["files"])
                if stopped():
                    break
                if number % save_every == 0:
                    self._save(adapter, file, at)
            self._save(adapter, file, at)
        if self.out != self.table and at["files"] == len(self.order):
            self._to_parquet()
        return at

    def _rows(self, adapter: Adapter, at: Position) -> Iterator[list[list[object]]]:
        """The rows of each batch, with a row for each file that could not be read; ``at`` moves along."""
        stream = self._stream(self.order[at["files"] :])
        for x, _ in stream.batches(self.batch, seed=None, mean=self.config["mean"], std=self.config["std"]):
            with device.precision(self.on, self.amp):
                logits = adapter(x.to(self.on))
            confidence, best = logits.float().softmax(1).max(1)
            yield self._table_rows(list(zip(best.tolist(), confidence.tolist(), strict=True)), dict(stream.skipped), at)
        rest = len(self.order) - at["files"]
        if rest:  # nothing readable came after these
            yield self._table_rows([], dict(stream.skipped), at, rest)

    def _table_rows(
        self, predictions: list[tuple[int, float]], problems: dict[Path, str], at: Position, rest: int = 0
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

    def _stream(self, order: Order) -> images.FileStream:
        files = [path for path, _ in order]
        root = Path(os.path.commonpath([path.parent for path in files])) if files else Path()
        prepare = partial(images.fit, target=images.Target.of(self.config))
        labels = [images.UNKNOWN] * len(files)
        return images.FileStream("images", (), root, files, labels, prepare, recipe="predict")

    def _number(self, label: str) -> int | None:
        """The model's number for a class folder: by name, or by place where the model's classes have none."""
        if not label:
            return None
        if label in self.class_names:
            return self.class_names.index(label)
        return self.folders.index(label) if len(self.folders) == len(self.class_names) else None

    def _save(self, adapter: Adapter, file: IO[str], at: Position) -> None:
        file.flush()
        os.fsync(file.fileno())
        at |= {"bytes": self.table.stat().st_size, "images": self._digest(at["files"])}
        state.write(self.state, {**adapter.state_dict(), "predict": at})

    def _digest(self, files: int) -> str:
        """Of the first so many paths and the size of a batch; each path is taken in once, for ``files`` only grows."""
        for path, _ in self.order[self._hashed : files]:
            self._hash.update(os.fsencode(path) + b"\n")
        self._hashed = max(self._hashed, files)
        return self._hash.hexdigest()[:12]

    def _to_parquet(self) -> None:
        arrow_csv, parquet = _pyarrow()
        with replacing(self.out) as temporary:
            parquet.write_table(arrow_csv.read_csv(self.table), temporary)
        self.table.unlink()


def _pyarrow() -> tuple[Any, Any]:
    what = "A .parquet file"
    return need("pyarrow.csv", what, "parquet"), need("pyarrow.parquet", what, "parquet")
