"""Row-sparse backward: forward on B samples, backward on the B' chosen.

PyTorch computes the gradient of the whole batch even where the loss touches half of it. Here the loss is built on the
chosen rows of the logits, and what flows back is a `RowGradient`: it claims B rows and stores those that count. The
user's model is not changed.

The samples are independent under GroupNorm, LayerNorm, InstanceNorm and BatchNorm with the source's statistics: there
the gradient is the textbook one. With the batch's statistics it is an approximation; `eata.rows.batchnorm` says which.

How an adapter uses it, with one `Engine` for its life::

    engine = rows.Engine(lean=False)
    logits = engine.forward(net, lambda: net(x))                      # (B, C), with a graph
    gradients = engine.gradients(logits, index, loss_of, parameters)  # as torch.autograd.grad(..., allow_unused=True)

``loss_of`` gets the logits of the chosen rows, (B', C), and gives the loss. If anything inside fails, the forward pass
is run again and the full gradient is taken, for this batch and all later ones, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eata import allocator
from eata.errors import EataError
from eata.rows.forward import Watch
from eata.rows.gradient import Place, RowGradient, Rows

__all__ = ["Engine", "RowGradient", "Rows", "Watch", "select_rows"]

BREAK_EVEN = 0.7  # share of stored rows above which the full backward is as fast (benchmarks.step)


class Engine:
    """Forward passes watched, and gradients on some rows of them.

    Args:
        lean: keep in memory only what training scale and shift needs (`eata.lean`).

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> x, chosen, engine = torch.randn(8, 3), torch.tensor([1, 4]), Engine()
    >>> logits = engine.forward(net, lambda: net(x))
    >>> ours = engine.gradients(logits, chosen, torch.sum, list(net[1].parameters()))
    >>> textbook = torch.autograd.grad(net(x)[chosen].sum(), list(net[1].parameters()))
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, textbook))
    True
    """

    def __init__(self, lean: bool = False) -> None:
        self.lean = lean
        self.failed = False
        self.rows: Rows | None = None  # what the last gradient stored; None after a full one
        self._channels_last = True
        self._watch: Watch | None = None
        self._again: Callable[[], Tensor] | None = None

    def forward(self, net: nn.Module, run: Callable[[], Tensor]) -> Tensor:
        """``run()``, which calls ``net`` and gives its logits, watched; it is kept to be repeated if need be."""
        self._watch, self._again = None, run
        if self.failed or not torch.is_grad_enabled() or _compiled(net):
            return run()
        try:
            return self._watched(run)
        except Exception:
            # Code that takes images apart by .view() does not run on every memory layout. The model's own errors come
            # again the second time.
            if not self._channels_last:
                raise
            self._channels_last = False
            return self._watched(run)

    def _watched(self, run: Callable[[], Tensor]) -> Tensor:
        watch = Watch(self.lean, self._channels_last)
        with watch:
            logits = run()
        if self.lean and isinstance(logits, Tensor) and logits.device.type == "cpu":
            allocator.give_back()
        self._watch = watch
        return logits

    def gradients(
        self,
        logits: Tensor,
        index: Tensor,
        loss_of: Callable[[Tensor], Tensor],
        parameters: Sequence[Tensor],
    ) -> tuple[Tensor | None, ...]:
        """Gradients of ``loss_of(logits[index])``.

        Args:
            logits: of ``forward``, batch first.
            index: chosen rows, each once, at least one.
            loss_of: from the chosen rows' logits, (B', C), to a scalar.
            parameters: to differentiate by.

        Returns:
            One gradient for each parameter; None where it does not take part.
        """
        index = checked_index(logits, index)
        watch, again, self._watch, self._again = self._watch, self._again, None, None
        self.rows = rows = None if watch is None else watch.rows_for(logits, index, BREAK_EVEN)
        if watch is None or again is None or rows is None:
            return _full(logits, index, loss_of, parameters)
        try:
            chosen = select_rows(logits, index, rows)
            found = torch.autograd.grad(loss_of(chosen), parameters, allow_unused=True)
        except Exception as problem:  # whatever the model does that no rule foresaw: the textbook gradient is right
            self.failed, self.rows = True, None
            first = (str(problem).splitlines() or [""])[0]
            warnings.warn(
                f"The row-sparse backward does not work with this model ({type(problem).__name__}: {first}); "
                "using the full gradient from here on. backward='full' avoids this warning.",
                UserWarning,
                stacklevel=2,
            )
            return _full(again(), index, loss_of, parameters)
        finally:
            watch.rows = None
        return tuple(g.dense() if isinstance(g, RowGradient) else g for g in found)


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


def _full(
    logits: Tensor, index: Tensor, loss_of: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    chosen = logits if len(index) == len(logits) and _ascending(index) else logits.index_select(0, index)
    return torch.autograd.grad(loss_of(chosen), parameters, allow_unused=True)


def _ascending(index: Tensor) -> bool:
    return bool((index[1:] > index[:-1]).all())


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


def _compiled(net: nn.Module) -> bool:
    """Whether some part is compiled: its backward is one opaque kernel that takes plain tensors only."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in net.modules())
