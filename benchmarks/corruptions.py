"""How many times as many images a second our corruptions make as ``imagecorruptions`` does, on one core.

    python -m benchmarks.corruptions --out results/speed-corruptions    # both sizes; about five minutes
    python -m benchmarks.corruptions --side 32 --rounds 3 snow fog

The two are timed in turns on the same images, all five severities, in processor time (other programs do not disturb it
much), and the medians over the rounds are compared. The
reference has ImageNet-C's constants at every size; ours takes CIFAR-10-C's at 32 pixels.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from torch import Tensor

from benchmarks import record
from eata.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt

try:
    import cv2
    from imagecorruptions import corrupt as reference
except ImportError:
    sys.exit(
        "benchmarks.corruptions needs the reference beside eata, in an environment of its own:\n"
        "  python3 -m venv /tmp/reference\n"
        "  PIP_CONSTRAINT=constraints.txt /tmp/reference/bin/pip install . imagecorruptions-imaug\n"
        "  /tmp/reference/bin/python -m benchmarks.corruptions"
    )

# Images of one timing, for ours and for the reference: it works image by image, so a few show its pace.
COUNTS = {32: (256, 32), 224: (16, 3)}


def photographs(count: int, side: int) -> Tensor:
    """Crops of scikit-learn's sample photograph."""
    from sklearn.datasets import load_sample_image

    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    rng = np.random.default_rng(0)
    tops = rng.integers(0, photo.shape[1] - side, count)
    lefts = rng.integers(0, photo.shape[2] - side, count)
    return torch.stack([photo[:, t : t + side, x : x + side] for t, x in zip(tops, lefts, strict=True)])


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(name: str, side: int, rounds: int) -> tuple[float, float]:
    """Seconds an image, mean of the severities: the reference's and ours."""
    ours, theirs = COUNTS[side]
    images = photographs(ours, side)
    arrays = images[:theirs].permute(0, 2, 3, 1).contiguous().numpy()

    def run_reference(severity: int, count: int) -> None:
        with contextlib.redirect_stdout(None):  # it says at some sizes that its zooms are a pixel short
            for array in arrays[:count]:
                reference(array, severity, corruption_name=name)

    times: dict[int, tuple[list[float], list[float]]] = {severity: ([], []) for severity in SEVERITIES}
    for severity, (slow, fast) in times.items():
        run_reference(severity, 1)  # compiles, fills caches
        corrupt(images[:1], name, severity)
        for _ in range(rounds):
            slow.append(seconds(lambda severity=severity: run_reference(severity, theirs)) / theirs)
            fast.append(seconds(lambda severity=severity: corrupt(images, name, severity)) / ours)
    return mean(median(slow) for slow, _ in times.values()), mean(median(fast) for _, fast in times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="corruptions; default: all 15")
    parser.add_argument("--side", type=int, choices=sorted(COUNTS), help="pixels; default: both")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each; default: 5")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the times there, as results/speed-corruptions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    made, times, tables = record.manifest(), {}, []
    for side in [options.side] if options.side else sorted(COUNTS):
        lines = [f"{side} x {side}: milliseconds an image on one core", "", "| corruption | reference | eata | times |"]
        lines.append("|---|---:|---:|---:|")
        print("\n".join(lines))
        pairs = {}
        for name in options.names or CORRUPTIONS:
            pairs[name] = slow, fast = compare(name, side, options.rounds)
            lines.append(f"| {name} | {1000 * slow:.3f} | {1000 * fast:.3f} | {slow / fast:.1f} |")
            print(lines[-1], flush=True)
        ratios = [slow / fast for slow, fast in pairs.values()]
        lines.append(f"| mean of the times | | | {mean(ratios):.1f} |")
        lines.append(f"| geometric mean | | | {math.exp(mean(map(math.log, ratios))):.1f} |")
        slow, fast = (sum(column) for column in zip(*pairs.values(), strict=True))
        lines.append(f"| one after another | {1000 * slow:.3f} | {1000 * fast:.3f} | {slow / fast:.1f} |")
        print("\n".join(lines[-3:]))
        times[side] = {name: {"reference": slow, "eata": fast} for name, (slow, fast) in pairs.items()}
        tables.append("\n".join(lines))
    record.keep_folder(options.out, made, {"seconds an image": times}, tables)


if __name__ == "__main__":
    main()
