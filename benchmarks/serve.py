"""`eata serve` under load, on loopback only. Each command is bounded and prints what it measured.

    python -m benchmarks.serve throughput            # beside the same model in-process, and LitServe; about 4 minutes
    python -m benchmarks.serve accuracy              # of single images, with and without a window
    python -m benchmarks.serve soak --minutes 30     # memory, errors, versions and state in step
    python -m benchmarks.serve kill --times 50       # kill -9 at random moments under load
    python -m benchmarks.serve hostile --requests 10000

With --out FILE.json before the command the numbers are kept.
Throughput is of single-image requests from 32 clients, as a ratio to the same model called in-process in batches of 64
with the same adaptation; the sides take turns, and each number is the median over the rounds. Clients, server and model
share the machine's cores, while in-process has them alone. Latency is measured at half the throughput found, beside the
time of a batch of 64. LitServe (`pip install litserve`, here or where `--litserve PYTHON` says) serves the same net
without adaptation, with images as base64 in JSON (it takes no raw bytes), in batches of up to 64 that wait as long as
ours. The machine should do nothing else; on one that does, `--busy` takes one thread and processor time (of servers and
clients together) instead of the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

import eata
from benchmarks import record, serve_accuracy, serve_endurance, serve_hostile
from benchmarks.serve_load import INFER, NET, Server, drive, eata_serve, free_port, http, request, start
from eata import allocator

BATCH = 64
WAIT = 10  # milliseconds
LITSERVE = f"""
import base64, sys
import litserve, numpy as np, torch
import eata, eata.allocator

class Net(litserve.LitAPI):
    def setup(self, device):
        eata.allocator.keep_freed_memory()  # as the eata command does
        self.model = eata.Source(eata.models.load("{NET}"))
    def decode_request(self, request):
        return np.frombuffer(base64.b64decode(request["image"]), "<f4").reshape(3, 32, 32)
    def batch(self, inputs):
        return torch.from_numpy(np.stack(inputs))
    def predict(self, x):
        return self.model(x)
    def unbatch(self, output):
        return output.tolist()
    def encode_response(self, output):
        return {{"logits": output}}

if __name__ == "__main__":
    api = Net(max_batch_size={BATCH}, batch_timeout={WAIT / 1000})
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False, log_level="warning")
"""


def images(count: int) -> np.ndarray:
    """CIFAR-10 test images if they were fetched, else the digits that the package has; as the net sees them."""
    try:
        stream = eata.data.load("cifar10")
    except (eata.EataError, OSError):
        stream = eata.data.load("digits", size=32)
    found, _ = next(iter(stream.batches(count, seed=0, mean=(0.5,) * 3, std=(0.5,) * 3)))
    return np.asarray(found.numpy())


def litserve(folder: Path, python: Path) -> Server | None:
    asked = subprocess.run([python, "-c", "import litserve"], capture_output=True, check=False)
    if asked.returncode:
        print("LitServe is not installed (pip install litserve, or --litserve PYTHON): left out")
        return None
    (folder / "lit.py").write_text(LITSERVE)
    port = free_port()
    return start([str(python.absolute()), "lit.py", str(port)], folder, port).wait_until_ready("/health")


def in_process(model: eata.Adapter, x: torch.Tensor, arguments: argparse.Namespace) -> float:
    """Images a second."""
    clock = time.process_time if arguments.busy else time.perf_counter
    end, begin, done = time.perf_counter() + arguments.seconds, clock(), 0
    while time.perf_counter() < end:
        model(x)
        done += len(x)
    return done / (clock() - begin)


def adapting() -> eata.Adapter:
    """What ``eata serve --method eta`` makes."""
    net = eata.models.load(NET)
    return eata.Window(eata.ETA(net, **eata.preset("cifar10", eata.ETA)), length=BATCH)


def throughput(arguments: argparse.Namespace) -> int:
    """Always 0: it prints a table."""
    made = record.manifest()
    if arguments.busy:
        os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1 if arguments.busy else arguments.threads)
    x = images(256)
    ours = [request(INFER, each[None]) for each in x]
    theirs = [
        http("/predict", json.dumps({"image": base64.b64encode(each.astype("<f4").tobytes()).decode()}).encode(),
             "Content-Type: application/json\r\n")
        for each in x
    ]  # fmt: skip
    batch = torch.from_numpy(x[:BATCH])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        options = ("--wait", str(WAIT), "--batch", str(BATCH), "--state")
        servers = {
            "eata serve, ETA": eata_serve(folder, "--method", "eta", *options, "adapting"),
            "eata serve, Source": eata_serve(folder, "--method", "source", *options, "source"),
        }
        try:
            for server in servers.values():
                server.wait_until_ready("/v2/health/ready")
            if (other := litserve(folder, arguments.litserve)) is not None:
                servers["LitServe, no adaptation"] = other
            models = {"in-process, ETA": adapting(), "in-process, Source": eata.Source(eata.models.load(NET))}
            sides: dict[str, Callable[[], float]] = {
                name: lambda model=model: in_process(model, batch, arguments)  # type: ignore[misc]
                for name, model in models.items()
            }
            for name, server in servers.items():
                content = theirs if "LitServe" in name else ours
                sides[name] = lambda server=server, content=content: rate(server, content, arguments)  # type: ignore[misc]
            rates = {name: [] for name in sides}  # type: dict[str, list[float]]
            for number in range(arguments.rounds + 1):
                for name, measure in sides.items():
                    found = measure()
                    if number:  # the first warms up
                        rates[name].append(found)
            ratios = tell(rates)
            # a latency is the clock's
            latency = {} if arguments.busy else half_load(servers["eata serve, ETA"], ours, rates, arguments)
        finally:
            for server in servers.values():
                server.end()
    given = {name: getattr(arguments, name) for name in ("clients", "rounds", "seconds", "threads", "busy")}
    record.keep(arguments.out, made, {**given, "ratios": ratios, **latency, "images_a_second": rates})
    return 0


def rate(server: Server, content: list[bytes], arguments: argparse.Namespace) -> float:
    def clock() -> float:
        return server.processor_time() + time.process_time() if arguments.busy else time.perf_counter()

    begin = clock()
    load = asyncio.run(drive(server.port, content, arguments.clients, arguments.seconds))
    if load.errors or load.lost:
        raise RuntimeError(f"{len(load.errors)} errors, {load.lost} lost; the first: {[*load.errors, ''][0]}")
    return len(load.seconds) / (clock() - begin)


def tell(rates: dict[str, list[float]]) -> dict[str, float]:
    """Print the table; the ratios, by the names of both sides."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {NET}")
    print("| side | images a second | over in-process, same adaptation | over LitServe |\n|---|---|---|---|")
    ratios = {}
    for name, found in rates.items():
        cells = []
        for other in ("in-process, ETA" if "ETA" in name else "in-process, Source", "LitServe, no adaptation"):
            cells.append("")
            if other in rates and name != other:
                ratio = median(a / b for a, b in zip(found, rates[other], strict=True))
                ratios[f"{name} over {other}"], cells[-1] = ratio, f"{ratio:.2f}"
        print(f"| {name} | {median(found):.0f} | {' | '.join(cells)} |")
    return ratios


def half_load(
    server: Server, content: list[bytes], rates: dict[str, list[float]], arguments: argparse.Namespace
) -> dict[str, float]:
    """Print and give the latency at half of the throughput."""
    wanted = median(rates["eata serve, ETA"]) / 2
    load = asyncio.run(drive(server.port, content, arguments.clients, 3 * arguments.seconds, wanted))
    batch = BATCH / median(rates["in-process, ETA"])
    p50, p99 = load.percentile(0.5), load.percentile(0.99)
    print(
        f"at half load ({wanted:.0f} a second): p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms, "
        f"which is {p99 / batch:.2f} of the time of a batch of {BATCH} ({1000 * batch:.0f} ms); "
        f"{len(load.errors)} errors"
    )
    return {"half_load_rate": wanted, "p50_seconds": p50, "p99_seconds": p99, "p99_over_batch": p99 / batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a .json file for the numbers (before the command)")
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("throughput", help="beside in-process and LitServe")
    timed.add_argument("--clients", type=int, default=32)
    timed.add_argument("--rounds", type=int, default=5)
    timed.add_argument("--seconds", type=float, default=6, help="of each side in each round (default 6)")
    timed.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the in-process side")
    timed.add_argument("--litserve", type=Path, default=Path(sys.executable), help="the Python that has LitServe")
    timed.add_argument(
        "--busy", action="store_true", help="one thread, processor time instead of the clock on the wall"
    )
    timed.set_defaults(run=throughput)
    serve_accuracy.add(commands)
    serve_endurance.add(commands)
    serve_hostile.add(commands)
    allocator.keep_freed_memory()
    arguments = parser.parse_args()
    try:
        sys.exit(arguments.run(arguments))
    except KeyboardInterrupt:
        sys.exit("stopped")  # the servers are ended by now, and a soak has kept what it saw


if __name__ == "__main__":
    main()
