"""What each of several processes does in the tests of eata.parallel; its findings go to a file for each rank."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import eata
from eata import mesh, state

COLLAPSE = 16  # the batch before which a guarded model collapses
Make = Callable[[nn.Module], eata.Adapter]


@dataclasses.dataclass
class Case:
    """A method around a net, and its stream; ``sizes[i][rank]`` is the length of a rank's shard of batch i."""

    name: str
    net: nn.Module
    make: Make
    batches: list[Tensor]
    sizes: list[list[int]]

    def model(self) -> eata.Adapter:
        return self.make(copy.deepcopy(self.net))

    def shard(self, number: int, rank: int) -> Tensor:
        return self.batches[number].split(self.sizes[number])[rank]


def work(rank: int, world: int, folder: Path, scenes: dict[str, Any]) -> None:
    """Every scene in one go: starting a process takes longer than most of them.

    Two processes talk as if they were on two machines, three by sockets of their own.
    """
    torch.set_num_threads(1)
    if world == 2:
        mesh.LARGEST = -1
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for name, argument in scenes.items():
        found[name] = globals()[name](rank, world, folder, argument)
        state.write(folder / f"found{world}-{rank}.safetensors", found)  # what comes before a death stays


def outcome(model: eata.Adapter, answers: list[Tensor]) -> dict[str, Any]:
    saved = model.state_dict()
    parameters = saved.get("parameters", {})
    average = saved["memory"].get("average")
    return {"answers": answers, "parameters": parameters, "average": average, "stats": saved["stats"]}


def equality(rank: int, world: int, folder: Path, cases: list[Case]) -> dict[str, Any]:
    found = {}
    for case in cases:
        model = eata.parallel(case.model())
        answers = [model(case.shard(number, rank)) for number in range(len(case.batches))]
        found[case.name] = outcome(model, answers)
    return found


def guarding(rank: int, world: int, folder: Path, cases: list[Case]) -> dict[str, Any]:
    found = {}
    for case in cases:
        guard = case.model()
        model = eata.parallel(guard)
        shards = [case.shard(number, rank) for number in range(len(case.batches))]
        answers = guarded_answers(model, guard, shards)
        found[case.name] = guarded_outcome(guard, answers)
    return found


def guarded_answers(model: eata.Adapter, guard: eata.Adapter, batches: list[Tensor]) -> list[Tensor]:
    """A stream in the middle of which the model collapses, as if steps had led there."""
    assert isinstance(guard, eata.Guard)
    answers = []
    for number, batch in enumerate(batches):
        if number == COLLAPSE:
            with torch.no_grad():
                for parameter in guard.method.parameters.values():  # type: ignore[attr-defined]
                    parameter.zero_()
        answers.append(model(batch))
    return answers


def guarded_outcome(guard: eata.Adapter, answers: list[Tensor]) -> dict[str, Any]:
    assert isinstance(guard, eata.Guard)
    events = [dataclasses.asdict(event) for event in guard.events]
    return {**outcome(guard.method, answers), "events": events, "memory": guard.memory.read()}


def approximation(rank: int, world: int, folder: Path, case: Case) -> dict[str, Any]:
    """The row-sparse gradient under BatchNorm, where no rank chooses too many rows, one of them does, one has none."""
    found = {}
    for name, chosen in {"all": (6, 6), "one": (6, 0), "many": (6, 20)}.items():
        model = eata.parallel(case.model())
        method: Any = model.model
        method.select = lambda batch, count=chosen[rank]: first_rows(batch, count)
        model(case.shard(0, rank))
        found[name] = {**outcome(model, []), "rows": method.runner.engine.rows is not None}
    return found


def first_rows(batch: eata.Pass, count: int) -> eata.Choice:
    return eata.Choice(torch.arange(count), torch.ones(count, dtype=batch.logits.dtype), count)


def saving(rank: int, world: int, folder: Path, case: Case) -> None:
    """Half of a stream; the last rank saves."""
    model = eata.parallel(case.model())
    for number in range(len(case.batches) // 2):
        model(case.shard(number, rank))
    if rank == world - 1:
        model.save(folder / "half.safetensors")


def loading(rank: int, world: int, folder: Path, case: Case) -> dict[str, Any]:
    """The other half."""
    model = eata.parallel(case.model())
    model.load(folder / "half.safetensors")
    answers = [model(case.shard(number, rank)) for number in range(len(case.batches) // 2, len(case.batches))]
    return outcome(model, answers)


def refusals(rank: int, world: int, folder: Path, case: Case) -> dict[str, str]:
    """Each is said in every process, and the stream goes on."""
    model = eata.parallel(case.model())
    x = case.batches[2][:8]
    said = {
        "dtype": _said(lambda: model(x.byte() if rank == 1 else x)),
        "shape": _said(lambda: model(x[:, :, :4] if rank == 1 else x)),
        "empty": _said(lambda: model(x[:0])),
        "twice": _said(lambda: eata.parallel(model.model)),
    }
    model(x)
    if rank == 1:
        model.model.learning = False
    said["frozen"] = _said(lambda: model(x))
    model.model.learning = True
    if rank == 1:
        model.reset()
    said["state"] = _said(lambda: model(x))
    model.reset()
    model(x)
    said["method"] = _said(lambda: eata.parallel(eata.Tent(copy.deepcopy(case.net), lr=0.1 if rank else 0.2)))
    said["guard"] = _said(lambda: eata.Guard(model))
    said["snapshot"] = _said(lambda: model.snapshot(x))
    return said


def death(rank: int, world: int, folder: Path, case: Case) -> dict[str, Any]:
    """The last rank is killed in the middle of a backward pass; the others save after each batch."""
    model = eata.parallel(case.model(), timeout=20)
    path = folder / f"state-{rank}.safetensors"
    for number in range(4):
        model(case.shard(number, rank))
        model.save(path)
    before = model.state_dict()
    processes = model.processes
    if rank == world - 1:
        total, begun = processes.total, processes.messages

        def dies(values: Tensor) -> Tensor:
            if processes.messages == begun + 8:  # agree, count, 2 layers, finite, choice, average, 1 layer backward
                os.kill(os.getpid(), signal.SIGKILL)
            return total(values)

        processes.total = dies  # type: ignore[method-assign]
    start = time.monotonic()
    said = _said(lambda: model(case.shard(4, rank)))
    seconds = time.monotonic() - start
    return {
        "said": said,
        "again": _said(lambda: model(case.shard(4, rank))),
        "seconds": seconds,
        "messages": processes.messages,
        "unchanged": _same(before, model.state_dict()),
    }


def silence(rank: int, world: int, folder: Path, case: Case) -> dict[str, Any]:
    """The last rank does not come."""
    model = eata.parallel(case.model(), timeout=3)
    start = time.monotonic()
    if rank == world - 1:
        time.sleep(6)
        return {}
    return {"said": _said(lambda: model(case.shard(0, rank))), "seconds": time.monotonic() - start}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _said(act: Callable[[], object]) -> str:
    try:
        act()
    except eata.EataError as problem:
        return str(problem)
    return ""
