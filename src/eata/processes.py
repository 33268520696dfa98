"""The processes that share an adaptation, and what they tell one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from eata.errors import EataError


class Processes:
    """All processes of ``torch.distributed``. Each method is called by every process, in the same order.

    A group of its own is made of them, with a timeout of its own: gloo's and NCCL's default is many minutes.

    Args:
        device: of the net, where messages start from and arrive.
        timeout: seconds to wait for the others before giving up.

    Attributes:
        rank: of this process.
        size: how many there are.
        messages: how many this process has taken part in.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise EataError(
                "There is no process group: start the program with torchrun, and call "
                "torch.distributed.init_process_group() before eata.parallel."
            )
        if not timeout > 0:
            raise EataError(f"timeout={timeout!r} is out of range: it has to be above 0 seconds.")
        self.device, self.timeout = device, timeout
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.messages = 0
        self._group = dist.new_group(timeout=timedelta(seconds=timeout))
        self._broken: EataError | None = None

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes: the same bits in each."""
        summed = values.detach().clone(memory_format=torch.contiguous_format)
        self._together(dist.all_reduce, summed)
        return summed

    def counts(self, *numbers: int) -> tuple[int, ...]:
        """The sum of each number over all processes."""
        summed = self.total(torch.tensor(numbers, dtype=torch.int64, device=self.device))
        return tuple(int(number) for number in summed.tolist())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every process, by rank."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._together(dist.all_gather, found, own)
        return [[int(number) for number in row.tolist()] for row in found]

    def rows(self, values: Tensor) -> Tensor:
        """The rows of every process, joined in the order of the ranks: the same bits in each. Some may have none."""
        lengths = [row[0] for row in self.gather([len(values)])]
        own = values.new_zeros(max(lengths), *values.shape[1:])
        own[: len(values)] = values.detach()
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._together(dist.all_gather, found, own)
        return torch.cat([part[:length] for part, length in zip(found, lengths, strict=True)])

    def gradients(self, found: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The sum of gradients by these parameters, all in one message; None where it is None in every process."""
        first = parameters[0]
        parts = [
            first.new_zeros(p.numel()) if g is None else g.flatten() for g, p in zip(found, parameters, strict=True)
        ]
        present = first.new_tensor([float(g is not None) for g in found])
        *sums, there = self.total(torch.cat([*parts, present])).split([*(len(part) for part in parts), len(found)])
        return tuple(
            total.view_as(parameter) if some else None
            for total, parameter, some in zip(sums, parameters, there.tolist(), strict=True)
        )

    def _together(self, collective: Callable[..., Any], *tensors: Any) -> None:
        if self._broken is not None:
            raise self._broken
        self.messages += 1
        try:
            collective(*tensors, group=self._group)
        except RuntimeError as problem:
            first = (str(problem).splitlines() or [""])[0]
            self._broken = EataError(
                f"Another process of this adaptation stopped, or did not come within {self.timeout:g} seconds; process "
                f"{self.rank} is as it was before the batch. Start all of them again from a saved state. ({first})"
            )
            raise self._broken from problem
