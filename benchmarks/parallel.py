"""One adaptation in 2 processes with one thread each against one process with 2 threads; bytes sent beside theory.

    python -m benchmarks.parallel                     # both nets; some minutes on a quiet machine
    python -m benchmarks.parallel --repeats 3 resnet26
    python -m benchmarks.parallel --out results/parallel.json
    python -m benchmarks.parallel --scale             # no measurement: the model of docs/scale.md, for more workers

The same total batch, in one run; the sides take turns, and each ratio is of two neighbours in time. Half of each shard
is chosen. 'exact' is backward="full" in one process, which computes the same as the two; 'auto' is its default, which
on a CPU is the row-sparse backward, an approximation under BatchNorm. In brackets: the ratio of processor seconds, all
threads and processes together, which a busy machine disturbs less. Bytes are what a process wrote to its sockets
(/proc/self/io); theory is `traffic`, and the header that gloo adds to each message, measured too. Weights and images
are random: the time does not depend on them.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks.nets import resnet50
from benchmarks.step import ours
from eata import norm
from eata.files import replacing
from eata.models import ResNet26

PROCESSES = 2
NETS: dict[str, tuple[int, tuple[int, ...], int]] = {  # total batch, sample, classes
    "resnet26": (64, (3, 32, 32), 10),
    "resnet50": (32, (3, 224, 224), 1000),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ResNet26(10, "bn") if name == "resnet26" else resnet50()


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


# Assumed, not measured: seconds a hop, bytes a second and link.
LINKS = {"NVLink": (3e-6, 200e9), "RDMA": (6e-6, 20e9), "TCP": (40e-6, 1.2e9)}
IMAGES_A_DAY = 1e9
SHARD = 64


def scale() -> None:
    """Bytes and seconds of a ResNet-50 step, by workers and link, in a tree (NCCL's way with many) and in a ring."""
    net = build("resnet50")
    print(f"{IMAGES_A_DAY:.0e} images a day, {SHARD} a worker and step")
    print(
        "| workers | step every, s | MB sent a step | MB/s sent | link | s waiting a step, tree | ring |\n"
        + "|---" * 7
        + "|"
    )
    for workers in (8, 64, 1024):
        sent, messages = traffic(net, 1000, workers)["sent"], traffic(net, 1000, workers)["messages"]
        interval = workers * SHARD / (IMAGES_A_DAY / 86_400)
        for link, (hop, bandwidth) in LINKS.items():
            tree = messages * 2 * math.ceil(math.log2(workers)) * hop + sent / bandwidth
            ring = messages * 2 * (workers - 1) * hop + sent / bandwidth
            print(
                f"| {workers:,} | {interval:.3f} | {sent / 1e6:.2f} | {sent / 1e6 / interval:.1f} | {link} "
                f"| {tree:.4f} | {ring:.3f} |"
            )
    parameters = sum(p.numel() for p in norm.affine_parameters(net).values())
    print(f"a publication of scale and shift: {4 * parameters:,} bytes to each replica")


def written() -> int:
    """Bytes that this process has written so far, to sockets too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def work(rank: int, folder: str, name: str, turns: Connection) -> None:
    """One step for each message from the main process; it gets the bytes and messages of the step back."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    batch, sample, _ = NETS[name]
    x = torch.randn(batch // PROCESSES, *sample)
    model = eata.parallel(ours(build(name), len(x) // 2), timeout=600)
    before = written()
    for _ in range(20):
        model.processes.counts(0)
    header = (written() - before) / 20 - 8  # what gloo adds to a message
    while turns.recv():
        bytes_before, messages_before, start = written(), model.processes.messages, time.process_time()
        model(x)
        used = time.process_time() - start
        turns.send((written() - bytes_before, model.processes.messages - messages_before, used, header))


def measure(name: str, repeats: int) -> dict[str, Any]:
    batch, sample, classes = NETS[name]
    torch.set_num_threads(PROCESSES)
    x = torch.randn(batch, *sample)
    alone = {how: ours(build(name), batch // 2, backward=how) for how in ("full", "auto")}
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(PROCESSES)]
    seconds: dict[str, list[float]] = {"parallel": [], "full": [], "auto": []}
    used: dict[str, list[float]] = {"parallel": [], "full": [], "auto": []}
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, folder, name, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for worker in workers:
            worker.start()
        for repeat in range(repeats + 1):
            timed = {how: _timed(model, x) for how, model in alone.items()}
            time.sleep(0.3)  # idle OpenMP threads spin for a while
            start = time.perf_counter()
            for pipe in pipes:
                pipe[0].send(True)
            sent = [pipe[0].recv() for pipe in pipes]
            timed["parallel"] = (time.perf_counter() - start, sum(one[2] for one in sent))
            for how, (wall, processor) in timed.items() if repeat else ():  # the first warms up
                seconds[how].append(wall)
                used[how].append(processor)
        for pipe in pipes:
            pipe[0].send(False)
        for worker in workers:
            worker.join(60)

    def ratio(of: dict[str, list[float]], how: str) -> float:
        return median(ours / theirs for ours, theirs in zip(of["parallel"], of[how], strict=True))

    return {
        "batch": batch,
        "seconds": {how: median(values) for how, values in seconds.items()},
        "processor_seconds": {how: median(values) for how, values in used.items()},
        "ratio": {how: ratio(seconds, how) for how in alone},
        "processor_ratio": {how: ratio(used, how) for how in alone},
        "measured": {"messages": sent[0][1], "sent": sent[0][0], "header": sent[0][3]},
        "theory": traffic(build(name), classes, PROCESSES),
    }


def _timed(model: eata.Adapter, x: Tensor) -> tuple[float, float]:
    """On the clock on the wall, and of the processor, all threads together."""
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
    found: dict[str, Any] = {
        "load_before": os.getloadavg()[0],
        "repeats": arguments.repeats,
        "torch": torch.__version__,
    }
    print(
        "| net | B | 2 x 1 thread / 1 x 2, exact | / 1 x 2, auto | messages | bytes sent | theory |\n"
        + "|---" * 7
        + "|"
    )
    for name in arguments.nets or NETS:
        found[name] = one = measure(name, arguments.repeats)
        print(
            f"| {name} | {one['batch']} | {one['ratio']['full']:.2f} ({one['processor_ratio']['full']:.2f}) "
            f"| {one['ratio']['auto']:.2f} ({one['processor_ratio']['auto']:.2f}) "
            f"| {one['measured']['messages']} of {one['theory']['messages']} | {one['measured']['sent']:,} "
            f"| {one['theory']['sent']:,.0f} + {one['theory']['messages']} x {one['measured']['header']:.0f} |",
            flush=True,
        )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(arguments.out) as temporary:
            Path(temporary).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
