"""How much each parameter matters to the source domain: the diagonal Fisher information (Eq. 9)."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from eata import functional, norm
from eata.check import nothing_to_adapt
from eata.errors import EataError
from eata.inputs import logits_of

BATCH = 64  # the paper's
Per = Literal["sample", "batch"]


class Fisher(dict[str, Tensor]):
    """Importance omega by parameter name, with how it was made.

    Attributes:
        per: ``"sample"`` (Eq. 9 as written), ``"batch"`` (the authors' program), or None where nobody knows.

    >>> Fisher({"0.weight": torch.ones(2)}, per="sample").per
    'sample'
    """

    def __init__(self, omega: Mapping[str, Tensor], per: Per | None) -> None:
        super().__init__(omega)
        self.per = per


def fisher(net: nn.Module, images: Tensor | Iterable[Any], *, samples: int = 2000, per: Per = "sample") -> Fisher:
    """Importance omega of each scale and shift (Eq. 9): the mean squared gradient of the loss on the net's own labels.

    ``per="sample"`` is the letter of Eq. 9: the gradient of each sample is squared, with the source statistics, under
    which samples are independent. The paper's beta for CIFAR-10 fits this scale. ``per="batch"`` squares the gradient
    of the mean over each batch of 64, with the batch's statistics: so does the authors' program for ImageNet, whose
    beta of 2000 fits that scale. Presets say which they need. No weight, buffer, flag or global random state changes.

    Where one backward pass can't tell the samples apart, they are taken one by one, which is slower; a net whose
    BatchNorm has no running statistics couples its samples and gets ``per="batch"``. A warning says so.

    Args:
        net: the source model, before it is wrapped.
        images: clean images as one tensor, or batches (a list, a DataLoader; of pairs, the first item counts).
        samples: how many samples to use at most; the paper's 2000 (300 to 500 are enough).
        per: ``"sample"`` (default) or ``"batch"``.

    Returns:
        omega by parameter name, each of its parameter's shape; its ``per`` says how it was made.

    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> omega = fisher(net, torch.randn(100, 2), samples=80)
    >>> sorted(omega), omega.per
    (['0.bias', '0.weight'], 'sample')
    """
    if per not in ("batch", "sample"):
        raise EataError(f"per={per!r} is neither 'batch' nor 'sample'.")
    if samples < 1:
        raise EataError(f"samples={samples} is too few; the paper uses 2000, and 300 are enough.")
    norm.require_unwrapped(net)
    names = norm.affine_parameters(net)
    if not names:
        raise EataError(f"There is no parameter whose importance could be measured. {nothing_to_adapt(net)}")
    if per == "sample" and norm.lacks_running_statistics(net):
        per = "batch"
        warnings.warn(
            "BatchNorm without running statistics couples the samples of a batch, so there is no gradient of one "
            "sample; the Fisher is made with per='batch'.",
            UserWarning,
            stacklevel=2,
        )
    prepared = norm.Prepared(net, "eata.fisher")
    try:
        with torch.inference_mode(False), torch.enable_grad(), _random_state_kept(), _statistics(net, per):
            for parameter in names.values():
                parameter.requires_grad_(True)
            omega = _mean_squares(net, _batches(images, samples), names, per)
    finally:
        prepared.restore()
    for name, value in omega.items():
        if not bool(torch.isfinite(value).all()):
            raise EataError(
                f"The importance of '{name}' is not finite: there is NaN or infinity in the images or the net."
            )
    return Fisher(omega, per)


def _statistics(net: nn.Module, per: Per) -> contextlib.AbstractContextManager[Any]:
    """The batch's or the source's, as the kind of importance asks."""
    if per == "sample":
        return contextlib.nullcontext()
    layers = norm.batch_norm_layers(net)
    if norm.is_compiled(net):
        return norm.without_running_statistics(layers)
    return norm.Normalizing(layers, norm.Statistics(prior=0))


def _mean_squares(
    net: nn.Module, batches: Iterator[Tensor], names: dict[str, nn.Parameter], per: Per
) -> dict[str, Tensor]:
    squares = _batch_squares if per == "batch" else _sample_squares
    total = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in names.items()}
    count = 0
    for x in batches:
        if per == "batch" and len(x) == 1 and norm.has_batch_norm(net):
            continue  # the last of 65 images, say: one has no statistics of its own
        for name, square in squares(net, x, names).items():
            total[name] += square
        count += 1 if per == "batch" else len(x)
    if count == 0:
        raise EataError("There are no images to measure importance on, or one; pass a few hundred clean ones.")
    return {name: value / count for name, value in total.items()}


def in_distribution(net: nn.Module, images: Tensor, keep: float | int) -> Tensor:
    """The images of a mixed unlabelled pool that look most like the training data, by energy score (Liu et al. 2020).

    The paper collects its Fisher samples by such an out-of-distribution detector.

    Args:
        net: the source model, before it is wrapped.
        images: the pool, (N, ...).
        keep: how many to keep: a fraction (a float, above 0 and at most 1) or a number (an int).

    Returns:
        The kept images, in the order of the pool.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(net.weight)
    >>> in_distribution(net, torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 5.0]]), keep=2)
    tensor([[9., 0.],
            [0., 5.]])
    """
    number = round(keep * len(images)) if isinstance(keep, float) else keep
    if not 1 <= number <= len(images):
        raise EataError(f"keep={keep} of {len(images)} images leaves {number}; keep between 1 and all of them.")
    prepared = norm.Prepared(net, "eata.in_distribution")
    try:
        with torch.no_grad():
            scores = torch.cat([functional.energy(logits_of(net(x))) for x in torch.split(images, BATCH)])
    finally:
        prepared.restore()
    return images[scores.topk(number, largest=False).indices.sort().values]


def _batch_squares(net: nn.Module, x: Tensor, names: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Squared gradient of the mean loss of a batch."""
    logits = logits_of(net(x))
    loss = F.cross_entropy(logits, logits.detach().argmax(1))
    gradients = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    return {name: g.square() for name, g in zip(names, gradients, strict=True) if g is not None}


def _sample_squares(net: nn.Module, x: Tensor, names: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Sum over the samples of their squared gradients, from one backward pass over the batch where that can be."""
    if len(x) > 1:
        with _PerSample(names, len(x)) as copies:
            logits = logits_of(net(x))
        if all(name in copies.of for name in names):
            losses = F.cross_entropy(logits, logits.detach().argmax(1), reduction="none")
            total = functional.per_sample(losses).sum()
            gradients = torch.autograd.grad(total, list(copies.of.values()))
            return {name: g.square().sum(0) for name, g in zip(copies.of, gradients, strict=True)}
        _warn_one_by_one(next(name for name in names if name not in copies.of))
    singles = [_batch_squares(net, one, names) for one in x.split(1)]
    return {name: torch.stack([s[name] for s in singles if name in s]).sum(0) for name in singles[0]}


def _warn_one_by_one(name: str) -> None:
    warnings.warn(
        f"One backward pass can't tell how each sample moves '{name}', so the samples are taken one by one, which is "
        "slower; per='batch' is fast.",
        UserWarning,
        stacklevel=5,
    )


class _PerSample(TorchFunctionMode):
    """Gives each sample its own copy of scale and shift, so that one backward pass yields a gradient per sample.

    ``norm(x, w, b)`` becomes ``norm(x) * W + B``, where row i of W and B is sample i's copy: its gradient is that of
    sample i alone, for the samples do not meet (source statistics).
    """

    def __init__(self, names: dict[str, nn.Parameter], size: int) -> None:
        super().__init__()
        self._name = {id(parameter): name for name, parameter in names.items()}
        self._size = size
        self.of: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm):
            return func(*args, **kwargs)
        positions = {F.batch_norm: (3, 4), F.instance_norm: (3, 4)}.get(func, (2, 3))
        values = list(args)
        weight, bias = (_take(values, kwargs, at, key) for at, key in zip(positions, ("weight", "bias"), strict=True))
        out: Tensor = func(*values, **kwargs)
        by_channel = func is not F.layer_norm
        if weight is not None:
            out = out * self._copy(weight, out, by_channel)
        return out if bias is None else out + self._copy(bias, out, by_channel)

    def _copy(self, parameter: Tensor, out: Tensor, by_channel: bool) -> Tensor:
        """Row i for sample i, shaped to broadcast against the layer's output."""
        name = self._name.get(id(parameter))
        if name is None:  # not ours to measure
            rows = parameter.detach().expand(1, *parameter.shape)
        else:
            if name not in self.of:
                self.of[name] = parameter.detach().expand(self._size, *parameter.shape).clone().requires_grad_()
            rows = self.of[name]
        if by_channel:
            return rows.reshape(*rows.shape, *[1] * (out.dim() - 2))
        return rows.reshape(len(rows), *[1] * (out.dim() - rows.dim()), *parameter.shape)


def _take(values: list[Any], kwargs: dict[str, Any], position: int, key: str) -> Any:
    """Remove and return an argument, given by position or by name."""
    if position < len(values):
        value, values[position] = values[position], None
        return value
    return kwargs.pop(key, None)


def _batches(images: Tensor | Iterable[Any], samples: int) -> Iterator[Tensor]:
    """Batches of inputs, ``samples`` in all."""
    left = samples
    for item in torch.split(images, BATCH) if isinstance(images, Tensor) else images:
        x = item[0] if isinstance(item, (tuple, list)) else item
        if not isinstance(x, Tensor):
            raise TypeError(f"A batch is a {type(x).__name__}; pass tensors, or pairs that begin with one.")
        x = x[:left]
        left -= len(x)
        yield x.clone() if x.is_inference() else x
        if left == 0:
            return


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Put every global generator that a data loader may draw from back to where it was."""
    numpy = sys.modules.get("numpy")
    before, numpy_before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(numpy_before)
