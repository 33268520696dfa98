"""What is watched while the model runs: BatchNorm layers, and where a gradient may come back to rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from eata import lean as lean_forward
from eata.rows import batchnorm
from eata.rows.gradient import Rows, reenter

DESCRIBED = 3  # every third BatchNorm layer tells as much of the rows as all of them (cosines equal to 0.002)
NORMS = (F.group_norm, F.layer_norm, F.instance_norm, F.batch_norm)


class Watch(TorchFunctionMode):
    """One forward pass. BatchNorm by the batch's statistics is replaced by our own; all else runs as it is.

    Args:
        lean: swap convolutions, ReLU and pooling for those that keep less (`eata.lean`).
        channels_last: images lie pixel by pixel from the first convolution on, the layout that CPU kernels like best.
    """

    def __init__(self, lean: bool = False, channels_last: bool = False) -> None:
        super().__init__()
        self.lean, self.channels_last = lean, channels_last
        self.rows: Rows | None = None  # of the backward pass under way
        self.layers: list[batchnorm.Moments] = []  # of those that describe the rows
        self.lengths: list[int] = []  # of the input of each BatchNorm layer

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and self.channels_last and isinstance(args[0], Tensor):
            self.channels_last = False
            if args[0].dim() == 4 and args[0].device.type == "cpu":
                args = (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
        if func is F.group_norm and not args[0].requires_grad:
            # PyTorch 2.13 crashes in the channels-last backward of a GroupNorm whose input needs no gradient.
            args = (args[0].contiguous(), *args[1:])
        if func in NORMS and torch.is_grad_enabled():
            result = self._batch_norm(*args, **kwargs) if func is F.batch_norm else NotImplemented
            if result is NotImplemented:
                result = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.requires_grad:
                result.register_hook(self._reenter)
            return result
        swap: Callable[..., Any] | None = lean_forward.SWAPS.get(func) if self.lean else None
        if swap is not None and torch.is_grad_enabled():
            result = swap(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        by_batch = training and running_mean is None and (weight is None) == (bias is None)
        if not by_batch or x.numel() == x.shape[1] or not (x.requires_grad or _learns(weight)):
            return NotImplemented
        described = len(self.lengths) % DESCRIBED == 0
        moments = batchnorm.row_moments(x, described)
        self.lengths.append(x.shape[0])
        if described and moments is not None:
            self.layers.append(moments)
        return batchnorm.BatchNorm.apply(x, weight, bias, eps, moments, self.lean)  # type: ignore[no-untyped-call]

    def _reenter(self, gradient: Tensor) -> Tensor | None:
        return None if self.rows is None else reenter(gradient, self.rows)

    def rows_for(self, logits: Tensor, index: Tensor, break_even: float) -> Rows | None:
        """Rows to store for the chosen ones, stand-ins included; None where the full backward is as fast."""
        batch = len(logits)
        if len(index) > break_even * batch or any(length != batch for length in self.lengths):
            return None
        stored, weight = index.sort().values, None
        if self.layers:
            stored, weight = batchnorm.stand_ins(self.layers, stored)
        if len(stored) > break_even * batch:
            return None
        self.rows = Rows(stored, batch, weight)
        return self.rows


def _learns(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad
