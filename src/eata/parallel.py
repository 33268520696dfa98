"""One adaptation over many processes: N of them with shards of a batch compute what one computes with all of it."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from eata import norm
from eata.adapter import Adapter, Stats
from eata.errors import EataError, InputError
from eata.guard import Guard
from eata.inputs import Inputs
from eata.norm import Statistics
from eata.parallel_passes import SharedRunner, placeholder
from eata.passes import Runner
from eata.processes import Processes
from eata.wrapper import Wrapper


def parallel(model: Adapter, *, timeout: float = 60.0) -> Parallel:
    """One adaptation over all processes of ``torch.distributed``: each gives its shard of a batch, all learn from all.

    What the processes compute together is what one process computes with the shards joined in the order of the ranks:
    predictions, weights, moving averages and stats. Each of them gets the logits of its own shard. They share the
    moments of BatchNorm, the number of chosen samples, the mean prediction and the gradient; the Fisher term is added
    once. The weights are the same in each, so any of them can save, and a state saved by N loads into M, or into the
    plain adapter. A guard goes inside, ``parallel(eata.Guard(model))``: it judges by the samples of all, so that every
    process decides the same.

    Every process calls the model for every batch. A shard may be of any length; an empty one, ``x[:0]``, takes part
    too. If a process stops, or does not come, the others raise within ``timeout``, and are as they were before.

    Under BatchNorm with the batch's statistics ``backward="auto"`` means the textbook's gradient here: the row-sparse
    one is an approximation there, and differs with the shards. ``"rows"`` asks for it all the same.

    Args:
        model: ``eata.Source``, ``BN``, ``Tent``, ``ETA``, ``EATA`` or another method that is ``divisible``, or an
            ``eata.Guard`` around one; the same in every process.
        timeout: seconds to wait for the others before giving up; default 60.

    >>> import eata, tempfile, torch.distributed as dist
    >>> folder = tempfile.TemporaryDirectory()
    >>> dist.init_process_group("gloo", init_method=f"file://{folder.name}/store", rank=0, world_size=1)  # by torchrun
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> model = parallel(eata.Tent(net, lr=0.1))
    >>> model(torch.randn(4, 2)).shape, model.stats.backwards
    (torch.Size([4, 3]), 4)
    >>> dist.destroy_process_group()
    """
    if not isinstance(model, Adapter):
        raise TypeError(f"eata.parallel takes an adapter, not a {type(model).__name__}: eata.parallel(eata.Tent(net)).")
    method = model.method if isinstance(model, Guard) else model
    name = f"eata.{type(method).__name__}"
    if not model.divisible:
        raise EataError(
            f"{name} can't be spread over processes: what it learns from a batch is not a sum over its samples; run it "
            "in each process by itself."
        )
    if norm.lacks_running_statistics(model.net):
        raise EataError("A BatchNorm layer has no running statistics, which eata.parallel needs to share moments.")
    if _couples(model.net, method.statistics):
        if type(method.statistics) is not Statistics:
            raise EataError(f"{name} has statistics of its own kind, which can't be spread over processes.")
        if norm.is_compiled(model.net):
            raise EataError("A compiled net hides its layers, so moments can't be shared; give eata the plain net.")
    if not isinstance(runner := method.runner, Runner):
        raise EataError("This adapter is spread over processes already; call eata.parallel once.")
    first = next(model.net.parameters(), torch.empty(0))
    shared = Parallel(model, Processes(first.device, timeout))
    by_rows = getattr(method, "backward", None) == "rows"
    method.runner = SharedRunner(runner, shared.processes, _couples(model.net, method.statistics), by_rows)
    if isinstance(model, Guard):
        model.joined = shared.processes.rows
    return shared


def _couples(net: nn.Module, statistics: Statistics) -> bool:
    """Whether BatchNorm makes the samples of a batch depend on one another."""
    return norm.has_batch_norm(net) and statistics.couples


class Parallel(Wrapper):
    """An adapter whose batches are spread over processes; made by ``eata.parallel``.

    Args:
        model: the adapter, the same in every process.
        processes: all of them.
    """

    whole = False

    def __init__(self, model: Adapter, processes: Processes) -> None:
        super().__init__(model)
        self.processes = processes
        known, state = [], self.model.state_dict()
        while state:  # of a guard, and of the adapter inside
            known += [state[key] for key in ("method", "settings", "source")]
            state = state.get("model", {})
        number = zlib.crc32(json.dumps(known, default=str).encode())
        _require_equal(processes.gather([number]), "method, settings or source weights")

    # --- the loop -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict this process's shard of a batch, then adapt on all shards together.

        Args:
            args: tensors as the net takes them, samples first; none of them in an empty shard.
            kwargs: the same, by name.

        Returns:
            Logits of the shard, (b, C) or (b, C, ...), without gradient.
        """
        with self.lock, torch.inference_mode(False), torch.set_grad_enabled(True):
            self.require_ready()
            inputs, good, samples, rejected = self._agree(Inputs(*args, **kwargs))
            before = self._before()
            try:
                with nullcontext() if samples > rejected else self.frozen():
                    logits = self.run(inputs if good is None else inputs.take(good))
            except BaseException:
                self._go_back(before)
                raise
            self.stats.rejected += rejected
            if good is None:
                return logits
            filled = logits.new_full((len(inputs), *logits.shape[1:]), math.nan)
            filled[good] = logits
            return filled

    # A method's messages of a batch come before anything changes but its counters; a guard's come after its step.

    def _before(self) -> Stats | dict[str, Any]:
        return self.model.state_dict() if isinstance(self.model, Guard) else dataclasses.replace(self.stats)

    def _go_back(self, before: Stats | dict[str, Any]) -> None:
        if isinstance(before, Stats):
            self.stats = before
        else:
            self.model.take(before)

    def checked(self, inputs: Inputs) -> Inputs:
        tensors = inputs.tensors
        if tensors and all(tensor.dim() and not len(tensor) for tensor in tensors):
            self.model.checked(placeholder(inputs))
            return inputs
        return self.model.checked(inputs)

    def _agree(self, inputs: Inputs) -> tuple[Inputs, Tensor | None, int, int]:
        """The shard, a mask of its finite rows (None: all); how many samples there are, and how many are not finite.

        Both of all processes; or the same error in each.

        Nothing has changed yet, so this is where a process says that it can't go on.
        """
        problem: Exception | None = None
        good, size, bad, kind = None, 0, 0, 0
        try:
            inputs = self.checked(inputs)
            good = inputs.finite_rows()
            size = len(inputs)
            bad = 0 if good is None else int((~good).sum())
            kind = zlib.crc32(str(inputs.kind).encode())
        except (EataError, TypeError) as found:
            problem = found
        state = (self.learning, self.stats.forwards, self.stats.steps)
        rows = self.processes.gather([problem is not None, size, bad, kind, *state])
        if problem is not None:
            raise problem
        refused = [rank for rank, row in enumerate(rows) if row[0]]
        if refused:
            raise InputError(f"Process {refused[0]} could not take its shard of the batch; nothing has changed.")
        _require_equal([row[3:4] for row in rows], "sizes of images")
        _require_equal([row[4:] for row in rows], "counters (a state that was not loaded, or frozen())")
        samples, rejected = (sum(row[column] for row in rows) for column in (1, 2))
        if not samples:
            raise InputError("The batch is empty in every process; skip it.")
        return inputs, good, samples, rejected

    # --- life and state: the method's own, so that a state fits any number of processes -----------------------------

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        super().move(device, dtype)
        self.processes.device = device

    def snapshot(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As the adapter's; with a batch, one process has to have all of it."""
        if args or kwargs:
            raise EataError(
                "A shard does not have the statistics of the batch: save the state, load it into the plain adapter in "
                "one process, and take the snapshot there."
            )
        return super().snapshot()

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def require_fit(self, saved: dict[str, Any]) -> None:
        self.model.require_fit(saved)

    def take(self, saved: dict[str, Any]) -> None:
        self.model.take(saved)


def _require_equal(rows: list[list[int]], what: str) -> None:
    """Raise, in every process, unless all rows are the same."""
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise EataError(f"Process {rank} has other {what} than process 0; give each the same.")
