"""One adaptation in 2 processes with one thread each against one process with 2 threads; bytes sent beside theory.

    python -m benchmarks.parallel                     # both nets; some minutes on a quiet machine
    python -m benchmarks.parallel --repeats 3 resnet26
    python -m benchmarks.parallel --out results/parallel/time.json
    python -m benchmarks.parallel --scale             # no measurement: the model of docs/scale.md, for more workers

The same total batch, in one run; the sides take turns, and each ratio is of two neighbours in time. Half of each shard
is chosen. 'exact' compares backward="full" on both sides, which compute the same; 'rows' compares backward="rows" with
the default of one process, which on a CPU is rows too. 'work' is processor seconds of both processes over those of one
process with one thread: 1 is a perfect division, and it holds on a busy machine too, where the times do not (threads
that wait for one another suffer most). The processes lay images out pixel by pixel, 'full' in one process as they
come: a part of 'exact' is that. Bytes are what a process wrote to its sockets (/proc/self/io, and its own count of what
does not go through gloo); theory is `traffic`, and the header that is added to each small message, measured too.
Weights and images are random: the time does not depend on them.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import eata
from benchmarks import record
from benchmarks.nets import resnet50
from benchmarks.step import ours
from eata import norm
from eata.models import ResNet26
from eata.parallel import Parallel

PROCESSES = 2
NETS: dict[str, tuple[int, tuple[int, ...], int]] = {  # total batch, sample, classes
    "resnet26": (64, (3, 32, 32), 10),
    "resnet50": (32, (3, 224, 224), 1000),
}
# Assumed, not measured: seconds a hop, bytes a second and link.
LINKS = {"NVLink": (3e-6, 200e9), "RDMA": (6e-6, 20e9), "TCP": (40e-6, 1.2e9)}
IMAGES_A_DAY = 1e9
SHARD = 64


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ResNet26(10, "bn") if name == "resnet26" else resnet50()


# --- on paper ---------------------------------------------------------------------------------------------------------


def traffic(net: nn.Module, classes: int, processes: int) -> dict[str, float]:
    """Messages of an EATA step, their payload, and what a ring sends of it from each process, in bytes.

    A ring all-reduce of P bytes sends 2 (N-1)/N P from each process.
    """
    channels = [layer.channels for layer in norm.batch_norm_layers(net)]
    parameters = norm.affine_parameters(net)
    forward = sum(2 * 8 * c for c in channels)  # two sums in 64 bits
    backward = sum(2 * 4 * c for c in channels)  # two sums in 32 bits
    gradient = 4 * (sum(p.numel() for p in parameters.values()) + len(parameters))
    payload = forward + backward + gradient + 4 * classes + 8 * (1 + 1 + 2)  # average; samples, finite, choice
    agreed = 8 * 7 * (processes - 1)  # an all-gather: to every other process
    ring = 2 * (processes - 1) / processes * payload + agreed
    return {"messages": 2 * len(channels) + 6, "payload": payload, "sent": ring}


def scale() -> None:
    """Bytes and seconds of a ResNet-50 step, by workers and link, in a tree (NCCL's way with many) and in a ring."""
    net = build("resnet50")
    print(f"{IMAGES_A_DAY:.0e} images a day, {SHARD} a worker and step")
    print("| workers | step every, s | MB sent a step | MB/s | link | waiting a step, tree, s | ring, s |")
    print("|---" * 7 + "|")
    for workers in (8, 64, 1024):
        step = traffic(net, 1000, workers)
        interval = workers * SHARD / (IMAGES_A_DAY / 86_400)
        for link, (hop, bandwidth) in LINKS.items():
            tree = step["messages"] * 2 * math.ceil(math.log2(workers)) * hop + step["sent"] / bandwidth
            ring = step["messages"] * 2 * (workers - 1) * hop + step["sent"] / bandwidth
            megabytes = step["sent"] / 1e6
            columns = (f"{workers:,}", f"{interval:.3f}", f"{megabytes:.2f}", f"{megabytes / interval:.1f}", link)
            print("|", " | ".join((*columns, f"{tree:.4f}", f"{ring:.3f}")), "|")
    parameters = sum(p.numel() for p in norm.affine_parameters(net).values())
    print(f"a publication of scale and shift: {4 * parameters:,} bytes to each replica")


# --- measured ---------------------------------------------------------------------------------------------------------


def written(model: Parallel) -> int:
    """Bytes that this process has written so far, to gloo's sockets too, and what it has sent beside gloo."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"]) + model.processes.sent


def work(rank: int, folder: str, name: str, turns: Connection) -> None:
    """One step for each message from the main process, which says how; it gets back what the step took."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    batch, sample, _ = NETS[name]
    x = torch.randn(batch // PROCESSES, *sample)
    models = {how: eata.parallel(ours(build(name), len(x) // 2, backward=how), timeout=600) for how in ("full", "rows")}
    few, before = torch.zeros(64), written(models["full"])
    for _ in range(20):
        models["full"].processes.total(few)
    header = (written(models["full"]) - before) / 20 - few.nbytes  # what is added to a small message
    while how := turns.recv():
        model = models[how]
        bytes_before, messages_before, start = written(model), model.processes.messages, time.process_time()
        model(x)
        used, messages = time.process_time() - start, model.processes.messages - messages_before
        turns.send({"processor": used, "sent": written(model) - bytes_before, "messages": messages, "header": header})


class Crew:
    """The processes, one step of all of them at a time."""

    def __init__(self, name: str, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(PROCESSES)]
        self.pipes = [here for here, _ in pipes]
        self.workers = [
            context.Process(target=work, args=(rank, folder, name, there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for worker in self.workers:
            worker.start()

    def step(self, how: str) -> tuple[float, float]:
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(how)
        self.told = [pipe.recv() for pipe in self.pipes]
        return time.perf_counter() - start, sum(one["processor"] for one in self.told)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send("")
        for worker in self.workers:
            worker.join(60)


def measure(name: str, repeats: int) -> dict[str, Any]:
    batch, sample, classes = NETS[name]
    x = torch.randn(batch, *sample)
    alone = {how: ours(build(name), batch // 2, backward=how) for how in ("full", "auto")}
    seconds: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(name, folder)
        for repeat in range(repeats + 1):
            timed = {}
            for how, model in alone.items():
                for threads in (1, PROCESSES):
                    timed[f"{how}, {threads}"] = _timed(model, x, threads)
            time.sleep(0.3)  # idle OpenMP threads spin for a while
            for how in ("full", "rows"):
                timed[f"{how}, processes"] = crew.step(how)
                told[how] = crew.told[0]
            for side, (wall, processor) in timed.items() if repeat else ():  # the first warms up
                seconds.setdefault(side, []).append(wall)
                used.setdefault(side, []).append(processor)
        crew.end()

    def ratio(of: dict[str, list[float]], one: str, other: str) -> float:
        return median(ours / theirs for ours, theirs in zip(of[one], of[other], strict=True))

    return {
        "batch": batch,
        "seconds": {side: median(values) for side, values in seconds.items()},
        "processor_seconds": {side: median(values) for side, values in used.items()},
        "exact": ratio(seconds, "full, processes", f"full, {PROCESSES}"),
        "rows": ratio(seconds, "rows, processes", f"auto, {PROCESSES}"),
        "exact_work": ratio(used, "full, processes", "full, 1"),
        "rows_work": ratio(used, "rows, processes", "auto, 1"),
        "measured": told["full"],
        "theory": traffic(build(name), classes, PROCESSES),
    }


def _timed(model: eata.Adapter, x: Tensor, threads: int) -> tuple[float, float]:
    """On the clock on the wall, and of the processor, all threads together."""
    torch.set_num_threads(threads)
    wall, processor = time.perf_counter(), time.process_time()
    model(x)
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", help="resnet26, resnet50 (default: both)")
    parser.add_argument("--repeats", type=int, default=7, help="default 7")
    parser.add_argument("--scale", action="store_true", help="print the model of docs/scale.md, and measure nothing")
    parser.add_argument("--out", type=Path, help="a .json file for the numbers")
    arguments = parser.parse_args()
    unknown = set(arguments.nets) - set(NETS)
    if unknown:
        parser.error(f"there is no net {sorted(unknown)[0]!r}; known are {', '.join(NETS)}")
    if arguments.scale:
        scale()
        return
    made, found = record.manifest(), dict[str, Any](repeats=arguments.repeats)
    print("| net | B | exact | rows | work, exact | work, rows | messages | bytes sent | theory |")
    print("|---" * 9 + "|")
    for name in arguments.nets or NETS:
        found[name] = one = measure(name, arguments.repeats)
        seen, theory = one["measured"], one["theory"]
        print(
            f"| {name} | {one['batch']} | {one['exact']:.2f} | {one['rows']:.2f} | {one['exact_work']:.2f} "
            f"| {one['rows_work']:.2f} | {seen['messages']} of {theory['messages']} | {seen['sent']:,} "
            f"| {theory['sent']:,.0f} + {theory['messages']} x {seen['header']:.0f} |",
            flush=True,
        )
    record.keep(arguments.out, made, found)


if __name__ == "__main__":
    main()
