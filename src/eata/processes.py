"""The processes that share an adaptation, and what they tell one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from eata import mesh
from eata.errors import EataError

T = TypeVar("T")


class Processes:
    """All processes of ``torch.distributed``. Each method is called by every process, in the same order.

    A group of its own is made of them, with a timeout of its own: gloo's and NCCL's default is many minutes. Small
    messages of the CPU go through sockets instead, where all are on one machine.

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
        self._mesh: mesh.Mesh | None = None
        self._mesh = mesh.connect(self.rank, self.size, timeout, self.gather)

    @property
    def sent(self) -> int:
        """Bytes that this process has sent by itself, and not through the group."""
        return 0 if self._mesh is None else self._mesh.sent

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes: the same bits in each."""
        own = values.detach().contiguous()
        if (sockets := self._sockets_for(own)) is not None:
            return reduce(torch.add, self._together(lambda: sockets.exchange(own)))
        summed = own.clone()
        self._together(lambda: dist.all_reduce(summed, group=self._group))
        return summed

    def counts(self, *numbers: int) -> tuple[int, ...]:
        """The sum of each number over all processes."""
        summed = self.total(torch.tensor(numbers, dtype=torch.int64, device=self.device))
        return tuple(int(number) for number in summed.tolist())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every process, by rank."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        return [[int(number) for number in row.tolist()] for row in self._of_all(own)]

    def rows(self, values: Tensor) -> Tensor:
        """The rows of every process, joined in the order of the ranks: the same bits in each. Some may have none."""
        lengths = [row[0] for row in self.gather([len(values)])]
        own = values.new_zeros(max(lengths), *values.shape[1:])
        own[: len(values)] = values.detach()
        return torch.cat([part[:length] for part, length in zip(self._of_all(own), lengths, strict=True)])

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

    def _of_all(self, own: Tensor) -> list[Tensor]:
        """The tensor of every process, by rank; all of one shape."""
        if (sockets := self._sockets_for(own)) is not None:
            return self._together(lambda: sockets.exchange(own))
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._together(lambda: dist.all_gather(found, own, group=self._group))
        return found

    def _sockets_for(self, message: Tensor) -> mesh.Mesh | None:
        """What the message goes through, if not through the group: the same in every process."""
        if message.device.type != "cpu" or message.nbytes > mesh.LARGEST:
            return None
        return self._mesh

    def _together(self, collective: Callable[[], T]) -> T:
        if self._broken is not None:
            raise self._broken
        self.messages += 1
        try:
            return collective()
        except BaseException as problem:
            first = (str(problem).splitlines() or [""])[0]
            self._broken = EataError(
                f"Another process of this adaptation stopped, or did not come within {self.timeout:g} seconds; process "
                f"{self.rank} is as it was before the batch. Start all of them again from a saved state. ({first})"
            )
            if isinstance(problem, RuntimeError | OSError):
                raise self._broken from problem
            raise  # an interruption: half a message may have been read
