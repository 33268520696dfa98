"""What goes into a net and what comes out: a batch of tensors in, logits out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eata.errors import EataError, InputError

# How PyTorch says that a tensor does not fit. Its other errors are the net's own affair, and keep their type.
_MISFIT = re.compile(
    r"size mismatch|sizes? of tensor|shapes? cannot be multiplied|expected .*(input|tensor).* to have|[Ee]xpected \dD"
    r"|should contain \d+ elements|normalized_shape|number of channels|kernel size can't be greater|smaller than kernel"
    r"|invalid for input of size|[Ee]xpected (number of|more than 1|weight|input)|[Gg]iven (groups|normalized)"
    r"|must match the size|too small"
)


class Inputs:
    """One batch as a net takes it: positional and keyword arguments, of which each tensor has the batch first.

    Args:
        args: as in ``net(*args)``.
        kwargs: as in ``net(**kwargs)``; what is no tensor (a flag, None) goes to the net as it is.

    >>> batch = Inputs(torch.zeros(4, 2), mask=torch.ones(4, 1), training=False)
    >>> len(batch), len(batch.take(torch.tensor([0, 2])))
    (4, 2)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        #: every tensor among the arguments
        self.tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Inputs:
        """The batch that ``tree`` was made from."""
        return cls(*tree["args"], **tree["kwargs"])

    def tree(self) -> dict[str, Any]:
        """As plain data, for what is remembered."""
        return {"args": list(self.args), "kwargs": self.kwargs}

    @property
    def first(self) -> Tensor:
        """The first tensor: the images, where the net takes images."""
        return self.tensors[0]

    @property
    def images(self) -> Tensor:
        """The first tensor, if it is a batch of images (B, C, H, W); else an error says so."""
        if self.first.dim() != 4:
            raise InputError(f"This method works on images (B, C, H, W), not on input of shape {tuple(self.shape)}.")
        return self.first

    @property
    def shape(self) -> torch.Size:
        """Of the first tensor."""
        return self.first.shape

    @property
    def kind(self) -> tuple[Any, ...]:
        """Samples of the same kind can be joined to a batch."""
        return tuple(tensor.shape[1:] for tensor in self.tensors), tuple(self.kwargs)

    def __len__(self) -> int:
        return self.first.shape[0]  # len(x) would be a Python function

    def __call__(self, net: nn.Module) -> Any:
        """What the net gives for this batch."""
        return net(*self.args, **self.kwargs)

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same batch with every tensor changed."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        args = [changed(value) for value in self.args]  # a list: the order of changes is that of `tensors`
        return Inputs(*args, **{name: changed(value) for name, value in self.kwargs.items()})

    def take(self, rows: Tensor | slice) -> Inputs:
        """Some of its samples."""
        return self.map(lambda tensor: tensor[rows])

    def with_images(self, images: Tensor) -> Inputs:
        """The same batch with other images."""
        old = self.images
        return self.map(lambda tensor: images if tensor is old else tensor)

    def split(self, size: int) -> list[Inputs]:
        """Parts of at most ``size`` samples."""
        if len(self) <= size:
            return [self]
        return [self.take(slice(start, start + size)) for start in range(0, len(self), size)]

    def finite_rows(self) -> Tensor | None:
        """None if every row is finite (the usual case), else a mask (B,) of those that are; one look at the device."""
        return finite_rows([tensor for tensor in self.tensors if tensor.is_floating_point()])


def joined(parts: Sequence[Inputs]) -> Inputs:
    """One batch of several of the same kind.

    >>> len(joined([Inputs(torch.zeros(2, 3)), Inputs(torch.ones(1, 3))]))
    3
    """
    if len(parts) == 1:
        return parts[0]
    columns = iter(zip(*(part.tensors for part in parts), strict=True))
    return parts[0].map(lambda _: torch.cat(next(columns)))


def finite_rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """None if every row of all tensors is finite, else a mask (B,) of those that are.

    A sum is finite unless a value is not, or it overflows; only then is every value looked at.
    """
    sums = [tensor.sum() for tensor in tensors]
    if not sums or math.isfinite(sums[0] if len(sums) == 1 else torch.stack(sums).sum()):
        return None
    mask = torch.stack([torch.isfinite(tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]).all(1)
                        for tensor in tensors]).all(0)  # fmt: skip
    return None if bool(mask.all()) else mask


def checked(inputs: Inputs, device: torch.device | None) -> Inputs:
    """The batch, if a net on ``device`` can take it; else an error that says what to do."""
    for value in inputs.args:
        if not isinstance(value, Tensor) and value is not None:
            raise TypeError(f"The input is a {type(value).__name__}; eata takes a batch as one tensor, or as several.")
    if not inputs.tensors:
        raise TypeError("There is no tensor among the arguments; eata takes a batch as one tensor, or as several.")
    first = inputs.first
    if any(tensor.numel() == 0 or tensor.dim() == 0 for tensor in inputs.tensors):
        raise InputError(f"The batch is empty (shape {tuple(first.shape)}); skip it.")
    if any(tensor.shape[0] != first.shape[0] for tensor in inputs.tensors):
        lengths = ", ".join(str(len(tensor)) for tensor in inputs.tensors)
        raise InputError(f"The tensors have {lengths} rows; each of them needs the batch first, and the same one.")
    if not first.is_floating_point() and first.dim() > 2:
        raise InputError(
            f"The images are {first.dtype}; the net wants floats, normalized as in its training "
            "(for example (x / 255 - mean) / std)."
        )
    for tensor in inputs.tensors:
        if device is not None and tensor.device != device:
            raise InputError(f"The input is on {tensor.device} and the net on {device}; use x.to({str(device)!r}).")
    if any(tensor.is_inference() for tensor in inputs.tensors):
        return inputs.map(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
    return inputs


def misfit(problem: Exception, inputs: Inputs) -> InputError | None:
    """What to say where the net failed because the batch has the wrong shape; None where it failed otherwise."""
    if isinstance(problem, torch.OutOfMemoryError) or not _MISFIT.search(str(problem)):
        return None
    return InputError(f"The net does not take input of shape {tuple(inputs.shape)}: {problem}")


def logits_of(output: Any) -> Tensor:
    """The logits in a net's output: itself, its ``.logits`` or ``["logits"]``, or the first item of a tuple.

    >>> logits_of((torch.zeros(1, 2), "features")).shape
    torch.Size([1, 2])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        found: Tensor = output.logits
        return found
    if isinstance(output, dict):
        output = output.get("logits")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError("The net's output is no tensor, has no 'logits' and is no tuple that begins with a tensor.")
    return output


def checked_logits(output: Any, inputs: Inputs) -> Tensor:
    """The logits in a net's output for this batch; an error where they are none."""
    logits = logits_of(output)
    if logits.dim() < 2 or len(logits) != len(inputs):
        raise InputError(
            f"The net gave logits of shape {tuple(logits.shape)} for input of shape {tuple(inputs.shape)}; eata needs "
            "(B, C) or (B, C, ...) with the batch first on both sides: add the batch dimension with x[None]?"
        )
    if logits.shape[1] < 2:
        raise InputError(f"The net has {logits.shape[1]} class; entropy needs at least 2.")
    return logits


def in_range(name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """Raise an error that names the argument unless low <= value <= high (low < value where open)."""
    inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
    if not inside:
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        if high < math.inf:
            bound += f" and at most {high:g}"
        raise EataError(f"{name}={value!r} is out of range: it has to be {bound}.")
