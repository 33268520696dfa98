"""How much each parameter matters to the source domain: the diagonal Fisher information (Eq. 9), and its curvature."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from eata import budget, functional, norm
from eata.check import nothing_to_adapt
from eata.errors import EataError
from eata.inputs import logits_of

BATCH = 64  # the paper's
ROWS = 16  # directions kept for a budget: on our nets 16 hold clean predictions nearly as well as 2,000
ROOM = 64  # directions while they are being gathered: what is cut early can't come back
Per = Literal["sample", "batch"]


class Fisher(dict[str, Tensor]):
    """Importance omega by parameter name, with how it was made.

    Attributes:
        per: ``"sample"`` (Eq. 9 as written), ``"batch"`` (the authors' program), or None where nobody knows.
        curvature: what a budget and the drift need, by parameter name, of shape (rows + 1, ...): the directions that
            matter most to the predictions, and the root of the diagonal of the rest (``eata.budget``). None where it
            was not made per sample.

    >>> Fisher({"0.weight": torch.ones(2)}, per="sample").per
    'sample'
    """

    def __init__(
        self, omega: Mapping[str, Tensor], per: Per | None, curvature: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(omega)
        self.per = per
        self.curvature = None if curvature is None else dict(curvature)


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
        omega by parameter name, each of its parameter's shape; its ``per`` says how it was made, and its
        ``curvature`` is what a budget needs.

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
            return (_by_batch if per == "batch" else _by_sample)(net, _batches(images, samples), names)
    finally:
        prepared.restore()


def _statistics(net: nn.Module, per: Per) -> contextlib.AbstractContextManager[Any]:
    """The batch's or the source's, as the kind of importance asks."""
    if per == "sample":
        return contextlib.nullcontext()
    layers = norm.batch_norm_layers(net)
    if norm.is_compiled(net):
        return norm.without_running_statistics(layers)
    return norm.Normalizing(layers, norm.Statistics(prior=0))


def _by_batch(net: nn.Module, batches: Iterator[Tensor], names: dict[str, nn.Parameter]) -> Fisher:
    """Squared gradients of the mean loss of each batch."""
    total = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in names.items()}
    count = 0
    for x in batches:
        if len(x) == 1 and norm.has_batch_norm(net):
            continue  # the last of 65 images, say: one has no statistics of its own
        _, gradients = _gradients(net, x, names)
        for name, gradient in gradients.items():
            total[name] += gradient.square()
        count += 1
    _require_some(count)
    _require_finite(total)
    return Fisher({name: value / count for name, value in total.items()}, "batch")


def _by_sample(net: nn.Module, batches: Iterator[Tensor], names: dict[str, nn.Parameter]) -> Fisher:
    """Squared gradients of each sample's loss, and the curvature of the predictions."""
    sizes = [parameter.numel() for parameter in names.values()]
    squares, spread = (torch.zeros(sum(sizes), dtype=torch.float64) for _ in range(2))  # on the host: MPS has no double
    rows = squares.new_zeros(0, sum(sizes))
    count = 0
    for x in batches:
        logits, gradients = _sample_gradients(net, x, names)
        squares += gradients.square().sum(0)
        _require_finite(dict(zip(names, squares.split(sizes), strict=True)))
        felt = gradients * _expected(logits)[:, None]
        spread += felt.square().sum(0)
        rows = budget.strongest(torch.cat([rows, felt]), ROOM)
        count += len(x)
    _require_some(count)
    rows = rows[:ROWS] / math.sqrt(count)
    rest = (spread / count - rows.square().sum(0)).clamp_min(0)
    split = torch.cat([(squares / count)[None], rows, rest.sqrt()[None]]).split(sizes, dim=1)
    shaped = {
        name: part.reshape(-1, *p.shape).to(p.device, p.dtype)
        for (name, p), part in zip(names.items(), split, strict=True)
    }
    return Fisher(
        {name: part[0].clone() for name, part in shaped.items()},
        "sample",
        {name: part[1:].clone() for name, part in shaped.items()},
    )


def _require_some(count: int) -> None:
    if count == 0:
        raise EataError("There are no images to measure importance on, or one; pass a few hundred clean ones.")


def _require_finite(values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise EataError(
                f"The importance of '{name}' is not finite: there is NaN or infinity in the images or the net."
            )


def _expected(logits: Tensor) -> Tensor:
    """From the gradient for the likeliest label to one that stands for labels as the net itself expects them, (N,).

    Eq. 9 takes the likeliest label, whose gradient vanishes where the net is sure; the predictions do not stop moving
    there. In nats it is the labels drawn by the net's own probabilities p that count: their gradients at the logits,
    ``p - e_y``, have the mean square ``1 - sum p^2``. The factor brings the one gradient that there is to this size,
    which is exact between two classes. Where a sample has many predictions (pixels), their mean counts.
    """
    p = logits.detach().cpu().double().softmax(1)
    label = p.argmax(1, keepdim=True)
    likeliest = p.scatter_add(1, label, -torch.ones_like(p)).square().sum(1)
    expected = (1 - p.square().sum(1)).clamp_min(0)
    sizes = [functional.per_sample(values) for values in (expected, likeliest)]
    return (sizes[0] / sizes[1].clamp_min(1e-30)).sqrt()


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


def _gradients(net: nn.Module, x: Tensor, names: dict[str, nn.Parameter]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of the mean loss of a batch by each parameter that it reaches."""
    logits = logits_of(net(x))
    loss = F.cross_entropy(logits, logits.detach().argmax(1))
    gradients = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    return logits, {name: g for name, g in zip(names, gradients, strict=True) if g is not None}


def _sample_gradients(net: nn.Module, x: Tensor, names: dict[str, nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Logits, and a row for each sample's gradient; from one backward pass over the batch where that can be."""
    if len(x) > 1:
        with _PerSample(names, len(x)) as copies:
            logits = logits_of(net(x))
        losses = F.cross_entropy(logits, logits.detach().argmax(1), reduction="none")
        wanted = {name: copies.of.get(name, parameter) for name, parameter in names.items()}
        found = torch.autograd.grad(functional.per_sample(losses).sum(), list(wanted.values()), allow_unused=True)
        gradients = dict(zip(names, found, strict=True))
        missed = [name for name, gradient in gradients.items() if gradient is not None and name not in copies.of]
        if not missed:  # what has no gradient at all plays no part: a second head, say
            rows = [
                torch.zeros(len(x), p.numel()) if (g := gradients[name]) is None else g.flatten(1).cpu()
                for name, p in names.items()
            ]
            return logits, torch.cat(rows, dim=1).double()
        _warn_one_by_one(missed[0])
    singles = [_gradients(net, one, names) for one in x.split(1)]
    rows = [
        torch.cat([one[name].flatten().cpu() if name in one else torch.zeros(p.numel()) for name, p in names.items()])
        for _, one in singles
    ]
    return torch.cat([logits for logits, _ in singles]), torch.stack(rows).double()


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
