"""The stress suite: EATA with and without a guard on hard streams of CIFAR-10(-C).

    python -m benchmarks.stress                                  # source, budget, budget+guard; 640 images a part
    python -m benchmarks.stress --methods tent tent+guard        # others
    python -m benchmarks.stress sorted garbage --images 256      # a taste

What was measured is kept in the folder, and not measured again. The table, the figure and the manifest are made anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eata.bench import hard, stress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", nargs="*", default=list(hard.STREAMS), help="default: all")
    parser.add_argument(
        "--methods", nargs="+", default=["source", "budget", "budget+guard"], help=str([*stress.METHODS])
    )
    parser.add_argument("--images", type=int, default=640, help="in each part of a stream (default 640)")
    parser.add_argument("--seed", type=int, default=2020)
    parser.add_argument("--split", default="test", choices=["test", "train"], help="train: for choosing thresholds")
    parser.add_argument("--data", default="cifar10", choices=[*stress.NETS])
    parser.add_argument("--out", type=Path, default=Path("results/stress"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    source = hard.Source(arguments.images, arguments.seed, arguments.split, arguments.data)
    for row in stress.run(arguments.streams, arguments.methods, source, arguments.out):
        print(
            f"{row['stream']}, {row['method']}: {row['during']:.1f} %, clean after {row['after']:.1f} %, worst "
            f"{row['worst']:.1f} %, {row['alarms']} alarms",
            flush=True,
        )
    print(stress.write(arguments.out))


if __name__ == "__main__":
    main()
