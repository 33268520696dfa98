"""A published row beside ours: the GroupNorm net of MEMO, CIFAR-10-C, one corruption after another, sorted by class.

    EATA_MEMO_GN=PATH python -m benchmarks.memo_gn --limit 2000 --out results/memo-gn-2000
    EATA_MEMO_GN=PATH python -m benchmarks.memo_gn --methods lame,roid --out results/memo-gn     # 10,000, as published

The settings are those of the published numbers (mariodoebler/test-time-adaptation): severity 5, batches of 200, Adam
0.001 for all that learn; EATA with beta 1, epsilon 0.4 and omega per batch; LAME with the rbf affinity, the default of
that program. SAR adapts all layers: the names that its program leaves alone (layer4) do not occur in this net. What is
done is kept: the same command goes on after the last corruption that was finished.

The weights are not part of this project (zhangmarvin/memo, MIT licence): ``EATA_MEMO_GN`` names the checkpoint, whose
``net`` holds them. ``eata bench ... --model benchmarks.memo_gn:net`` adapts the same net.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import eata
from eata import origin, state
from eata.bench import streams
from eata.bench.store import hardware
from eata.errors import EataError
from eata.files import replacing
from eata.models import ResNet26

VARIABLE = "EATA_MEMO_GN"
# Mean error in %, over five seeds.
PUBLISHED = {
    "source": 32.7, "tent": 87.6, "eata": 40.8, "sar": 37.1, "cotta": 44.5, "rotta": 33.7, "lame": 11.3, "roid": 15.9,
}  # fmt: skip
BATCH, SEED, HALVES = 200, 2020, (0.5, 0.5, 0.5)
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
    ours.pretrained_cfg = {"mean": HALVES, "std": HALVES}  # type: ignore[assignment]
    return ours.eval()


def build(method: str) -> eata.Adapter:
    """The method with the published settings."""
    if method == "eata":
        clean = next(eata.data.load("cifar10").batches(2000, seed=SEED, mean=HALVES, std=HALVES))[0]
        fisher = eata.fisher(net(), clean, per="batch")
        return eata.EATA(net(), fisher, beta=1.0, epsilon=0.4, **ADAM)  # type: ignore[arg-type]
    own: dict[str, Any] = {"sar": {"exclude": ()}, "lame": {"affinity": "rbf"}}.get(method, {})
    learns = {} if method in ("source", "lame") else ADAM
    return eata.method(method)(net(), **learns, **own)


def balanced(stream: eata.data.Stream, limit: int | None) -> NDArray[np.int64]:
    """As many of each class, the first: of all 10,000 too, each batch of 200 is then of one class."""
    first = [np.flatnonzero(stream.labels == label)[: None if limit is None else limit // 10] for label in range(10)]
    return np.concatenate(first)


def run(method: str, part: streams.Part, limit: int | None, model: eata.Adapter) -> dict[str, Any]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="source,lame,roid,sar,tent,eata,rotta")
    parser.add_argument("--limit", type=int, help="images a corruption, as many of each class (default: all 10,000)")
    parser.add_argument("--corruptions", type=int, default=15, help="only the first so many")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out: Path = arguments.out
    recipe = streams.parse("correlated")
    stream = streams.parts(recipe, eata.data.CORRUPTIONS, 5, SEED)[: arguments.corruptions]
    if not (out / "manifest.json").exists():
        keep(out / "manifest.json", manifest(arguments.limit, recipe.name))
    for method in arguments.methods.split(","):
        file, kept = out / f"{method}.json", out / "partial" / f"{method}.safetensors"
        done = json.loads(file.read_text())["parts"] if file.exists() else []
        model = build(method)
        if done and len(done) < len(stream):
            model.load(kept)
        for part in stream[len(done) :]:
            done.append(run(method, part, arguments.limit, model))
            error = 100 * sum(d["wrong"] for d in done) / sum(d["images"] for d in done)
            model.save(kept)
            keep(file, {"method": method, "settings": model.settings, "error": round(error, 2), "parts": done})
            print(f"{method}, {len(done)} of {len(stream)}: {error:.1f} % so far", flush=True)
        kept.unlink(missing_ok=True)
    table(out, len(stream))


def manifest(limit: int | None, stream: str) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "command": " ".join(["python -m benchmarks.memo_gn", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": origin.commit(),
        "versions": {"eata": eata.__version__, "torch": torch.__version__},
        "hardware": hardware(torch.device("cpu")),
        "weights": state.digest(net().state_dict().items()),
        "data": "CIFAR-10, corrupted here; severity 5",
        "images a corruption": limit or 10_000,
        "stream": f"{stream}, never reset, as many of each class",
        "batch": BATCH,
        "seed": SEED,
        "normalization": {"mean": HALVES, "std": HALVES},
        "metric": "error in %, mean over the corruptions",
    }


def table(out: Path, corruptions: int) -> None:
    """What is finished, beside what was published."""
    found = [
        json.loads((out / f"{method}.json").read_text()) for method in PUBLISHED if (out / f"{method}.json").exists()
    ]
    lines = ["| method | error | published (10,000 images, five seeds) |", "|---|---:|---:|"]
    for result in found:
        if len(result["parts"]) == corruptions:
            lines.append(f"| {result['method']} | {result['error']:.1f} | {PUBLISHED[result['method']]} |")
    with replacing(out / "table.md") as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def keep(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
