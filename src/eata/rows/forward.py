"""What is watched while the model runs: BatchNorm layers, and where a gradient may come back to rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eata.mixture import Given
from eata.norm import Layer, Normalizing, Statistics
from eata.rows import batchnorm, lean, shape_rules  # noqa: F401 (importing the rules registers them)
from eata.rows.gradient import Rows, reenter

DESCRIBED = 3  # every third BatchNorm layer tells as much of the rows as all of them (cosines equal to 0.002)
NORMS = (F.group_norm, F.layer_norm, F.instance_norm, F.batch_norm)


class Watch(Normalizing):
    """One forward pass. BatchNorm by the batch's statistics is replaced by our own; all else runs as it is.

    Args:
        layers: of the net that runs.
        statistics: what they normalize by.
        needs_features: whether the input of the last linear layer is asked for.
        keep_less: swap convolutions, ReLU and pooling for those that keep less (`eata.rows.lean`).
    """

    def __init__(
        self, layers: Sequence[Layer], statistics: Statistics, needs_features: bool = False, keep_less: bool = False
    ) -> None:
        super().__init__(layers, statistics, needs_features)
        self.keep_less = keep_less
        self.describes = True  # whether some rows may stand for others
        self.rows: Rows | None = None  # of the backward pass under way
        self.moments: list[batchnorm.Moments] = []  # of the layers that describe the rows
        self.lengths: list[int] = []  # of the input of each BatchNorm layer

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in NORMS:
            result = super().__torch_function__(func, types, args, kwargs)
            if isinstance(result, Tensor) and result.requires_grad:
                result.register_hook(self._reenter)
            return result
        swap: Callable[..., Any] | None = lean.SWAPS.get(func) if self.keep_less else None
        if swap is not None and torch.is_grad_enabled():
            result = swap(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)

    def batch_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, given: Given) -> Tensor:
        """BatchNorm whose backward pass takes rows, where it learns and the batch's own statistics take part."""
        learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
        one_value = x.numel() == x.shape[1] and given.pool is None
        if given.share == 1 or one_value or not learns or (weight is None) != (bias is None):
            return super().batch_norm(x, weight, bias, eps, given)
        described = self.describes and len(self.lengths) % DESCRIBED == 0
        moments = batchnorm.row_moments(x, described)
        self.lengths.append(x.shape[0])
        if described and moments is not None:
            self.moments.append(moments)
        return batchnorm.BatchNorm.apply(x, weight, bias, eps, given, moments, self.keep_less)  # type: ignore[no-any-return,no-untyped-call]

    def _reenter(self, gradient: Tensor) -> Tensor | None:
        return None if self.rows is None else reenter(gradient, self.rows)

    def rows_for(self, logits: Tensor, index: Tensor, break_even: float) -> Rows | None:
        """Rows to store for the chosen ones, stand-ins included; None where the full backward is as fast."""
        batch = len(logits)
        if len(index) > break_even * batch or any(length != batch for length in self.lengths):
            return None
        stored, weight = index.sort().values, None
        if self.moments:
            stored, weight = batchnorm.stand_ins(self.moments, stored)
        if len(stored) > break_even * batch:
            return None
        self.rows = Rows(stored, batch, weight)
        return self.rows
