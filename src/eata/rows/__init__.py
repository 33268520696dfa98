"""Row-sparse backward: forward on B samples, backward on the B' chosen.

PyTorch computes the gradient of the whole batch even where the loss touches half of it. Here the loss is built on the
chosen rows of the logits, and what flows back is a `RowGradient`: it claims B rows and stores those that count. The
user's model is not changed.

The samples are independent under GroupNorm, LayerNorm, InstanceNorm and BatchNorm with the source's statistics: there
the gradient is the textbook one. With the batch's statistics it is an approximation; `eata.rows.batchnorm` says which.

How an adapter uses it, with one `Engine` for its life (`eata.passes`)::

    watch = engine.watch(layers, statistics)   # the layers of the net, and what they normalize by
    with watch:
        logits = net(x)                        # (B, C), with a graph
    gradients = engine.gradients(watch, logits, index, loss_of, parameters)

``loss_of`` gets the logits of the chosen rows, (B', C), and gives the loss. If anything inside fails, `RowsFailed` is
raised, and the engine is out of order from there on: the caller forwards again and takes the full gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eata.errors import EataError
from eata.norm import Layer, Statistics
from eata.rows.forward import Watch
from eata.rows.gradient import Place, RowGradient, Rows

__all__ = ["Engine", "RowGradient", "Rows", "RowsFailed", "Watch", "full_gradients", "select_rows"]

BREAK_EVEN = 0.7  # share of stored rows above which the full backward is as fast (benchmarks.step)

LossOf = Callable[[Tensor], Tensor]
Gradients = tuple[Tensor | None, ...]


class RowsFailed(RuntimeError):  # noqa: N818 (it is an event, and always caught)
    """The row-sparse backward does not work with this model; the forward pass has to be run again."""


class Engine:
    """Gradients on some rows of watched forward passes.

    Args:
        lean: keep in memory only what training scale and shift needs (`eata.rows.lean`).

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> x, chosen, engine = torch.randn(8, 3), torch.tensor([1, 4]), Engine()
    >>> with engine.watch([], Statistics(prior=0)) as watch:
    ...     logits = net(x)
    >>> ours = engine.gradients(watch, logits, chosen, torch.sum, list(net[1].parameters()))
    >>> textbook = torch.autograd.grad(net(x)[chosen].sum(), list(net[1].parameters()))
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, textbook))
    True
    """

    def __init__(self, lean: bool = False) -> None:
        self.lean = lean
        self.failed = False
        self.rows: Rows | None = None  # what the last gradient stored; None after a full one

    def watch(self, layers: Sequence[Layer], statistics: Statistics, needs_features: bool = False) -> Watch:
        """For one forward pass of the net that has these BatchNorm layers."""
        return Watch(layers, statistics, needs_features, self.lean)

    def gradients(
        self, watch: Watch, logits: Tensor, index: Tensor, loss_of: LossOf, parameters: Sequence[Tensor]
    ) -> Gradients:
        """Gradients of ``loss_of(logits[index])``.

        Args:
            watch: of the forward pass.
            logits: of it, batch first.
            index: chosen rows, each once, at least one.
            loss_of: from the chosen rows' logits, (B', C), to a scalar.
            parameters: to differentiate by.

        Returns:
            One gradient for each parameter; None where it does not take part.
        """
        index = checked_index(logits, index)
        try:
            self.rows = rows = self.rows_for(watch, logits, index)
            if rows is not None:
                chosen = select_rows(logits, index, rows)
                found = torch.autograd.grad(loss_of(chosen), parameters, allow_unused=True)
        except EataError:  # said to the user
            raise
        except Exception as problem:  # whatever the model does that no rule foresaw: the textbook gradient is right
            self.failed, self.rows = True, None
            first = (str(problem).splitlines() or [""])[0]
            warnings.warn(
                f"The row-sparse backward does not work with this model ({type(problem).__name__}: {first}); "
                "using the full gradient from here on. backward='full' avoids this warning.",
                UserWarning,
                stacklevel=2,
            )
            raise RowsFailed from problem
        finally:
            watch.rows = None
        if rows is None:
            return full_gradients(logits, index, loss_of, parameters)
        return tuple(g.dense() if isinstance(g, RowGradient) else g for g in found)

    def rows_for(self, watch: Watch, logits: Tensor, index: Tensor) -> Rows | None:
        """Rows to store for the chosen ones; None where the full backward is as fast."""
        return watch.rows_for(logits, index, BREAK_EVEN)


def checked_index(logits: Tensor, index: Tensor) -> Tensor:
    """The index, ascending or not, if it names some rows of the logits, each once; else an error that says why."""
    if logits.dim() == 0:
        raise EataError("The logits are a scalar; the batch has to be their first dimension.")
    if index.dim() != 1 or index.dtype != torch.int64:
        raise EataError(
            f"The index is {index.dtype} of shape {tuple(index.shape)}; it has to be a vector of int64 positions."
        )
    if not len(index):
        raise EataError("No row is chosen, so there is no gradient; skip the step.")
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= len(logits):
        raise EataError(f"Row {low if low < 0 else high} is outside of the batch of {len(logits)} rows.")
    if len(index.unique()) != len(index):
        raise EataError("The index names a row twice; weigh that row instead.")
    return index


def full_gradients(logits: Tensor, index: Tensor, loss_of: LossOf, parameters: Sequence[Tensor]) -> Gradients:
    """The textbook gradients of ``loss_of(logits[index])``."""
    return torch.autograd.grad(loss_of(logits.index_select(0, index)), parameters, allow_unused=True)


class _SelectRows(torch.autograd.Function):
    """``x.index_select(0, index)``; the gradient of the result is stored for some rows only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.shape = rows, x.shape
        ctx.save_for_backward(index)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: a row gradient can't be differentiated again
            return g.new_zeros(ctx.shape).index_add(0, index, g), None, None
        stored = torch.searchsorted(ctx.rows.index, index)
        kept = g.new_zeros(ctx.rows.count, *g.shape[1:]).index_copy_(0, stored, g)
        return RowGradient(kept, ctx.rows, Place()), None, None


def select_rows(logits: Tensor, index: Tensor, rows: Rows | None = None) -> Tensor:
    """Rows of a tensor; the gradient that comes back is stored for ``rows`` only (those of the index, by default)."""
    if rows is None:
        rows = Rows(index.sort().values, len(logits))
    chosen: Tensor = _SelectRows.apply(logits, index, rows)  # type: ignore[no-untyped-call]
    return chosen
