"""Worker processes over one process: the wall time of the same run, side by side.

python -m benchmarks.workers               # eata bench cifar10-c --severity 5 --limit 1000
python -m benchmarks.workers --limit 500 --out results/workers   # quicker, and kept

Each way starts the command anew, in a folder of its own; the order of the ways changes from round to round. The
machine has to be idle: two processes can't be twice as fast where another program has one of the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eata.bench.manifest import manifest
from eata.files import replacing

WAYS = {
    "1 worker": ("--workers", "1", "--threads", "1"),
    "2 workers": ("--workers", "2", "--threads", "1"),
    "1 worker, 2 threads": ("--workers", "1", "--threads", "2"),
}


def seconds(options: tuple[str, ...], limit: int, methods: str) -> float:
    """Wall time of the command."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["bench", "cifar10-c", "--severity", "5", "--limit", str(limit), "--out", folder, *options]
        command += ["--methods", methods] if methods else []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "eata", *command], check=True, stdout=subprocess.DEVNULL, env=environment)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--methods", default="")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder of the results")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        ways = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
        for way in ways:
            found[way].append(seconds(WAYS[way], arguments.limit, arguments.methods))
            print(f"{way}: {found[way][-1]:.1f} s", flush=True)
    both = min(found["2 workers"])
    ratios = {way: both / min(found[way]) for way in ("1 worker", "1 worker, 2 threads")}
    for way, ratio in ratios.items():
        print(f"2 workers over {way}: {ratio:.2f} (load {os.getloadavg()[0]:.1f})")
    if arguments.out:
        keep(arguments.out / "manifest.json", found, ratios)


def keep(path: Path, found: dict[str, list[float]], ratios: dict[str, float]) -> None:
    content = {
        **manifest("python -m benchmarks.workers"),
        "seconds": found,
        "2 workers over": ratios,
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
