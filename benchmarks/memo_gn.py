"""A published row beside ours: the GroupNorm net of MEMO, CIFAR-10-C, one corruption after another, sorted by class.

    EATA_MEMO_GN=PATH python -m benchmarks.memo_gn --limit 2000 --out results/memo-gn-2000
    EATA_MEMO_GN=PATH python -m benchmarks.memo_gn --seeds 2020-2022 --out results/memo-gn       # 10,000, as published
    EATA_MEMO_GN=PATH python -m benchmarks.memo_gn --methods cotta --corruptions 3 --out results/memo-gn

The settings are those of the published numbers (mariodoebler/test-time-adaptation): severity 5, batches of 200, Adam
0.001 for all that learn but SAR, whose program takes SGD with momentum whatever the configuration says; EATA with beta
1, epsilon 0.4 and omega per batch; LAME with the rbf affinity, the default of that program. SAR adapts all layers: the
names that its program leaves alone (layer4) do not occur in this net. A seed is another order of the images within
their class, under every corruption, and other random numbers of the method; the corruptions come as they are published,
and the Fisher information is of the same images. What is done is kept: the same command goes on after the last
corruption that was finished, and another one adds its methods and seeds to the folder.

The weights are not part of this project (zhangmarvin/memo, MIT licence): ``EATA_MEMO_GN`` names the checkpoint, whose
``net`` holds them. ``eata bench ... --model benchmarks.memo_gn:net`` adapts the same net.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import eata
from eata import methods, origin, state
from eata.bench import streams
from eata.bench.manifest import manifest
from eata.cli.bench import numbers
from eata.errors import EataError
from eata.files import replacing
from eata.models import ResNet26

VARIABLE = "EATA_MEMO_GN"
# Mean error in %, over five seeds.
PUBLISHED = {
    "source": 32.7, "tent": 87.6, "eata": 40.8, "sar": 37.1, "cotta": 44.5, "rotta": 33.7, "lame": 11.3, "roid": 15.9,
}  # fmt: skip
BATCH, FISHER_SEED, HALVES = 200, 2020, (0.5, 0.5, 0.5)
ADAM = {"lr": 0.001, "optimizer": "adam"}


def net() -> ResNet26:
    """The net in eval mode; the tensors of both correspond in order, only their names differ."""
    path = Path(os.environ.get(VARIABLE, ""))
    if not path.is_file():
        raise EataError(f"Name the file of the weights: {VARIABLE}=PATH.")
    allowed = [np.dtype, np.dtypes.Float64DType, (np._core.multiarray.scalar, "numpy.core.multiarray.scalar")]
    with torch.serialization.safe_globals(allowed):  # the checkpoint holds its error, a numpy number
        theirs = torch.load(path, map_location="cpu", weights_only=True)["net"]
    ours = ResNet26(10, "gn")
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.values(), strict=True)))
    config = {"mean": HALVES, "std": HALVES, "input_size": (3, 32, 32), "num_classes": 10}
    ours.pretrained_cfg = config  # type: ignore[assignment]
    return ours.eval()


def build(method: str, seed: int) -> eata.Adapter:
    """The method with the published settings."""
    if method == "eata":
        clean = next(eata.data.load("cifar10").batches(2000, seed=FISHER_SEED, mean=HALVES, std=HALVES))[0]
        fisher = eata.fisher(net(), clean, per="batch")
        return eata.EATA(net(), fisher, beta=1.0, epsilon=0.4, **ADAM)  # type: ignore[arg-type]
    kind = eata.method(method)
    own: dict[str, Any] = {"sar": {"exclude": (), "optimizer": "sgd"}, "lame": {"affinity": "rbf"}}.get(method, {})
    learns = {} if method in ("source", "lame") else ADAM
    draws = {"seed": seed} if "seed" in methods.takes(kind) else {}
    return kind(net(), **{**learns, **own, **draws})


def balanced(stream: eata.data.Stream, limit: int | None) -> NDArray[np.int64]:
    """As many of each class, the first: of all 10,000 too, each batch of 200 is then of one class."""
    first = [np.flatnonzero(stream.labels == label)[: None if limit is None else limit // 10] for label in range(10)]
    return np.concatenate(first)


def one(part: streams.Part, limit: int | None, model: eata.Adapter) -> dict[str, Any]:
    """One corruption: images, wrong answers, seconds."""
    ((corruption, severity),) = part.shifts
    stream = eata.data.load("cifar10", corruption=corruption, severity=severity)
    images, labels = next(
        stream.batches(len(stream), seed=None, order=balanced(stream, limit), mean=HALVES, std=HALVES)
    )
    wrong, start = 0, time.perf_counter()
    for index in torch.from_numpy(streams.order(part, labels.numpy())).split(BATCH):
        answers = model(images[index]).argmax(1)
        wrong += int((answers != labels[index]).sum())
    seconds = round(time.perf_counter() - start, 1)
    return {"corruption": corruption, "images": len(labels), "wrong": wrong, "seconds": seconds}


def run(method: str, seed: int, corruptions: int, limit: int | None, out: Path) -> None:
    """One method over the stream of one seed, from where it stands."""
    file, states = out / f"{method}-{seed}.json", out / "partial"
    done = json.loads(file.read_text())["parts"] if file.exists() else []
    stream = streams.parts(streams.parse("correlated"), eata.data.CORRUPTIONS, 5, seed)[:corruptions]
    if len(done) >= len(stream):
        return
    model = build(method, seed)
    # by the number of corruptions: the state and the list of results always belong together
    kept = [states / f"{method}-{seed}-{number}.safetensors" for number in range(len(eata.data.CORRUPTIONS) + 1)]
    if done:
        model.load(kept[len(done)])
    for part in stream[len(done) :]:
        done.append(one(part, limit, model))
        model.save(kept[len(done)])
        about = {"method": method, "seed": seed, "commit": origin.commit(), "settings": model.settings}
        keep(file, {**about, "error": round(mean_error(done), 2), "parts": done})
        kept[len(done) - 1].unlink(missing_ok=True)
        print(f"{method}, seed {seed}, {len(done)} corruptions: {mean_error(done):.1f} % so far", flush=True)


def mean_error(parts: list[dict[str, Any]]) -> float:
    """Of corruptions with as many images each, in %."""
    return 100 * sum(part["wrong"] for part in parts) / sum(part["images"] for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="source,lame,roid,sar,tent,eata,rotta")
    parser.add_argument("--seeds", default="2020", help="such as 2020,2021 or 2020-2022")
    parser.add_argument("--limit", type=int, help="images a corruption, as many of each class (default: all 10,000)")
    parser.add_argument("--corruptions", type=int, default=15, help="only the first so many")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out: Path = arguments.out
    write_manifest(out / "manifest.json", arguments.limit)
    for seed in numbers(arguments.seeds):
        for method in arguments.methods.split(","):
            run(method, seed, arguments.corruptions, arguments.limit, out)
            table(out)
    print((out / "table.md").read_text())


def write_manifest(path: Path, limit: int | None) -> None:
    """What the numbers depend on, and the commands that made them."""
    made = manifest(f"{VARIABLE}=PATH python -m benchmarks.memo_gn")
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    images = known.get("images a corruption", limit or 10_000)
    if images != (limit or 10_000):
        raise EataError(f"{path.parent} holds results of {images} images a corruption; choose another --out.")
    commands = dict.fromkeys([*known.get("command", made["command"]).split(" && "), made["command"]])
    about = {
        **made,
        "command": " && ".join(commands),
        "started": known.get("started", made["started"]),
        "commit": known.get("commit", made["commit"]),
        "weights": state.digest(net().state_dict().items()),
        "data": "CIFAR-10, corrupted here; severity 5",
        "images a corruption": images,
        "stream": "correlated, never reset, as many of each class",
        "batch": BATCH,
        "normalization": {"mean": HALVES, "std": HALVES},
        "metric": "error in %, mean over the corruptions",
    }
    keep(path, about)


def table(out: Path) -> None:
    """What is there, beside what was published: mean and standard deviation over the seeds, as text and as CSV."""
    rows = [row for method in PUBLISHED if (row := summary(out, method))]
    names = ["method", "corruptions", "seeds", "error", "deviation", "first 3", "published"]
    texts = {
        "table.csv": "\n".join(",".join(row) for row in [names, *rows]),
        "table.md": "\n".join(
            [
                "| method | corruptions | seeds | error | of the first 3 | published (15 of 10,000 images, 5 seeds) |",
                "|---|---:|---:|---:|---:|---:|",
                *(
                    f"| {m} | {c} | {n} | {e}{f' ± {d}' if d else ''} | {first} | {p} |"
                    for m, c, n, e, d, first, p in rows
                ),
            ]
        ),
    }
    for name, text in texts.items():
        with replacing(out / name) as temporary:
            temporary.write_text(text + "\n")


def summary(out: Path, method: str) -> list[str]:
    """A line of the table, of the seeds that got as far as the one that got farthest; empty if there is none."""
    found = [json.loads(file.read_text())["parts"] for file in sorted(out.glob(f"{method}-[0-9]*.json"))]
    if not found:
        return []
    length = max(map(len, found))
    found = [parts for parts in found if len(parts) == length]
    errors = [mean_error(parts) for parts in found]
    deviation = f"{statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
    first = f"{statistics.fmean(mean_error(parts[:3]) for parts in found):.2f}" if length >= 3 else ""
    mean = f"{statistics.fmean(errors):.2f}"
    published = str(PUBLISHED[method]) if length == len(eata.data.CORRUPTIONS) else ""
    return [method, str(length), str(len(errors)), mean, deviation, first, published]


def keep(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
