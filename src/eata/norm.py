"""The normalization layers of a net: find them, say by which statistics they normalize, and put everything back.

Adaptation touches nothing else. Dropout, stochastic depth and the rest stay in eval mode, whatever the caller's mode.

Statistics are chosen for one forward pass at a time, from outside: `Normalizing` sees each call of BatchNorm while the
net runs, and asks its `Statistics` what to normalize by. The layers and their buffers stay as they are, so a copy of
the net, or its state_dict, is whole at any time.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from eata.errors import EataError
from eata.mixture import OWN_ALONE, Given, batch_norm
from eata.moments import mixed_statistics

if TYPE_CHECKING:
    from typing_extensions import Self

BatchNorm = _BatchNorm  # BatchNorm1d/2d/3d, SyncBatchNorm and what derives from them
LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm)  # _NormBase: BatchNorm1d/2d/3d, SyncBatchNorm, InstanceNorm1d/2d/3d

_wrapped: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


# --- the layers -------------------------------------------------------------------------------------------------------


def normalization_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Every normalization layer of ``net`` by name, in the order of registration."""
    return {name: module for name, module in net.named_modules() if isinstance(module, LAYERS)}


def affine_parameters(net: nn.Module, layers: int | None = None) -> dict[str, nn.Parameter]:
    """Scale and shift of the normalization layers by name (the paper's free parameters), each once.

    Args:
        net: any module.
        layers: only those of the last ``layers`` normalization layers; None means all.
    """
    found = normalization_layers(net)
    names = list(found) if layers is None else list(found)[-layers:]
    parameters: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name in names:
        for kind, parameter in found[name].named_parameters(recurse=False):
            if kind in ("weight", "bias") and id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[f"{name}.{kind}" if name else kind] = parameter
    return parameters


def has_batch_norm(net: nn.Module) -> bool:
    """Whether any layer's statistics couple the samples of a batch."""
    return any(isinstance(module, BatchNorm) for module in net.modules())


def lacks_running_statistics(net: nn.Module) -> bool:
    """Whether some BatchNorm layer always normalizes by its batch, for want of running statistics."""
    return any(isinstance(module, BatchNorm) and module.running_mean is None for module in net.modules())


def is_compiled(net: nn.Module) -> bool:
    """Whether some part is compiled: it runs as one opaque kernel, in which no layer can be seen."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in net.modules())


class Layer:
    """A BatchNorm layer that has running statistics, those of the source.

    Attributes:
        name: in the net.
        index: among the net's BatchNorm layers.
        module: the layer itself.
        channels: C.
        parameters: scale and shift, by name, as they are now; ``module.weight`` takes as long as a small operation.
    """

    def __init__(self, name: str, index: int, module: BatchNorm) -> None:
        self.name, self.index, self.module, self.channels = name, index, module, module.num_features
        self.parameters: dict[str, nn.Parameter | None] = vars(module)["_parameters"]

    @property
    def mean(self) -> Tensor:
        """The source's, (C,)."""
        return self.module.running_mean  # type: ignore[return-value]

    @property
    def variance(self) -> Tensor:
        """The source's, (C,)."""
        return self.module.running_var  # type: ignore[return-value]


def batch_norm_layers(net: nn.Module) -> list[Layer]:
    """The BatchNorm layers that have running statistics, in the order of registration."""
    found = [(name, m) for name, m in net.named_modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
    return [Layer(name, index, module) for index, (name, module) in enumerate(found)]


def is_plain(net: nn.Module) -> bool:
    """Whether every layer with running statistics is a BatchNorm of PyTorch's own, whose forward does nothing else.

    Scale and shift have to be parameters of its own, and not computed (``torch.nn.utils.parametrize``).
    """
    kept = [m for m in net.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    own = all(type(m).forward is _BatchNorm.forward and "forward" not in vars(m) for m in kept)
    return own and all({"weight", "bias"} <= vars(m)["_parameters"].keys() for m in kept)


def with_statistics(net: nn.Module, statistics: Mapping[int, tuple[Tensor, Tensor]]) -> nn.Module:
    """A copy of the net in eval mode whose BatchNorm layers, by index, have these running statistics."""
    copied = copy.deepcopy(net).eval()
    for layer in batch_norm_layers(copied):
        if layer.index in statistics:
            layer.module.running_mean, layer.module.running_var = statistics[layer.index]
    return copied


# --- the net made ready -----------------------------------------------------------------------------------------------


def wrapped_by(net: nn.Module) -> str | None:
    """Who holds the net now, if anybody."""
    return _wrapped.get(net)


def require_unwrapped(net: nn.Module) -> None:
    """Raise if an adapter holds ``net`` now: its weights are not the source's."""
    if net in _wrapped:
        raise EataError(
            f"This net is wrapped by {_wrapped[net]}; call unwrap() on that first, or build the net a second time."
        )


class Prepared:
    """A net made ready for adaptation, and everything needed to undo it.

    All modules go to eval mode, and all ``requires_grad`` flags go off. Nothing else of the net changes.
    """

    def __init__(self, net: nn.Module, owner: str) -> None:
        require_unwrapped(net)
        self._net = weakref.ref(net)
        self._modes = [(module, module.training) for module in net.modules()]
        self._flags = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
        _wrapped[net] = owner
        net.eval()
        net.requires_grad_(False)

    def restore(self) -> None:
        """Put flags and modes back as they were."""
        for module, training in self._modes:
            module.training = training
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        net = self._net()
        if net is not None:
            _wrapped.pop(net, None)


# --- by what they normalize -------------------------------------------------------------------------------------------


class Statistics:
    """By what BatchNorm layers normalize, in one forward pass after another.

    This one: ``N/(N+n) * source + n/(N+n) * batch``, with the prior N of the source in samples (Schneider et al. 2020).
    Infinity is the source's alone; 0 is the batch's alone.

    Args:
        prior: N.
        samples: what a batch counts for, n; None: its length.
        constant: no gradient flows through the batch's part of a mixture.
    """

    def __init__(self, prior: float, samples: int | None = None, constant: bool = False) -> None:
        self.prior, self.samples, self.constant = prior, samples, constant
        #: what is carried from batch to batch; reset, state files and moves of the adapter take it along
        self.carried: dict[str, Any] = {}

    @property
    def of_batch_alone(self) -> bool:
        """Whether one image would be normalized by itself."""
        return self.prior == 0

    @property
    def couples(self) -> bool:
        """Whether a sample's logits (may) depend on the others of its batch."""
        return self.share(1) < 1

    @property
    def rests(self) -> bool:
        """Whether they need the source's weights as well, and no step is to be taken."""
        return False

    def share(self, samples: int) -> float:
        """The source's part in a batch of so many samples."""
        return 1.0 if math.isinf(self.prior) else self.prior / (self.prior + (self.samples or samples))

    def prepare(self, samples: int, forward: Callable[[Tensor, Statistics], Tensor]) -> None:
        """A batch of so many samples is about to be predicted and learnt from.

        Args:
            samples: B.
            forward: from some of its rows (indices) and the statistics to try to their logits.
        """

    def notice(self, logits: Tensor) -> None:
        """The batch's logits, (B, C, ...), before the method learns from it."""

    def begin(self) -> None:
        """A forward pass begins, maybe the second try of one that failed half-way."""

    def for_layer(self, layer: Layer, x: Tensor) -> Given:
        """What the layer normalizes its input x (n, C, ...) by."""
        share = self.share(x.shape[0])
        if share == 0 and x.numel() == layer.channels:  # one value per channel has no variance
            share = 1.0
        if self.constant and 0 < share < 1:
            return Given(1.0, *mixed_statistics(x, (layer.mean, layer.variance), share))
        return Given(share, layer.mean, layer.variance)


class Recording(Statistics):
    """Other statistics, of which each layer's mean and variance are written down."""

    def __init__(self, inner: Statistics) -> None:
        super().__init__(inner.prior)
        self.inner = inner
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def for_layer(self, layer: Layer, x: Tensor) -> Given:
        share, mean, variance, pool, _ = self.inner.for_layer(layer, x)
        assert pool is None  # a snapshot is of one process
        if share < 1:
            mean, variance = mixed_statistics(x, (mean, variance), share)
        self.seen[layer.index] = (mean.clone(), variance.clone())
        return Given(1.0, mean, variance)


class Normalizing(TorchFunctionMode):
    """One forward pass in which BatchNorm layers normalize by the given statistics.

    Args:
        layers: of the net that runs.
        statistics: what they normalize by.
        needs_features: whether the input of the last linear layer is asked for.
    """

    def __init__(self, layers: Sequence[Layer], statistics: Statistics, needs_features: bool = False) -> None:
        super().__init__()
        self.layers, self.statistics, self.needs_features = layers, statistics, needs_features
        #: input of the last linear layer, which gives the logits
        self.features: Tensor | None = None

    def __enter__(self) -> Self:
        self._by_buffer = {id(layer.mean): layer for layer in self.layers}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        if func is F.linear and self.needs_features:
            self.features = args[0]
        if func is F.instance_norm and self.statistics.of_batch_alone:
            return self._instance_norm(*args, **(kwargs or {}))
        if func is F.group_norm and torch.is_grad_enabled() and not args[0].requires_grad:
            # PyTorch 2.13 crashes in the channels-last backward of a GroupNorm whose input needs no gradient.
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))

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
    ) -> Tensor:
        layer = self._by_buffer.get(id(running_mean))
        if layer is not None:
            return self.batch_norm(x, weight, bias, eps, self.statistics.for_layer(layer, x))
        if running_mean is None and x.numel() > x.shape[1]:  # it never had running statistics
            return self.batch_norm(x, weight, bias, eps, OWN_ALONE)
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)

    def normalize(self, layer: Layer, x: Tensor) -> Tensor:
        """What a layer of ours gives for x."""
        given, own = self.statistics.for_layer(layer, x), layer.parameters
        return self.batch_norm(x, own["weight"], own["bias"], layer.module.eps, given)

    batch_norm = staticmethod(batch_norm)  # a faster way may replace it

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Each sample by its own statistics, also where the source has running ones."""
        return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


@contextlib.contextmanager
def without_running_statistics(layers: Sequence[Layer]) -> Iterator[None]:
    """A compiled net hides its layers; with no buffers to use, PyTorch normalizes by the batch in eval mode too.

    ``track_running_stats=False`` alone would not do that.
    """
    names = ("running_mean", "running_var", "track_running_stats")
    kept = [(layer.module, {name: getattr(layer.module, name) for name in names}) for layer in layers]
    try:
        for module, _ in kept:
            module.running_mean = module.running_var = None
            module.track_running_stats = False
        yield
    finally:
        for module, values in kept:
            for name, value in values.items():
                setattr(module, name, value)
