"""The normalization layers of a net: find them, let them use the batch's statistics, and put everything back.

Adaptation touches nothing else. Dropout, stochastic depth and the rest stay in eval mode, whatever the caller's mode.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from eata.errors import EataError

LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm)  # _NormBase: BatchNorm1d/2d/3d, SyncBatchNorm, InstanceNorm1d/2d/3d

TINY = 1e-12  # keeps 1 / deviation finite

_wrapped: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


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
    return any(isinstance(module, _BatchNorm) for module in net.modules())


def lacks_running_statistics(net: nn.Module) -> bool:
    """Whether some BatchNorm layer always normalizes by its batch, for want of running statistics."""
    return any(isinstance(module, _BatchNorm) and module.running_mean is None for module in net.modules())


def require_unwrapped(net: nn.Module) -> None:
    """Raise if an adapter holds ``net`` now: its weights and statistics are not the source's."""
    if net in _wrapped:
        raise EataError(
            f"This net is wrapped by {_wrapped[net]}; call unwrap() on that first, or use a copy of the net."
        )


class Prepared:
    """A net made ready for adaptation, and everything needed to undo it.

    All modules go to eval mode, all ``requires_grad`` flags go off, and statistics are chosen by ``prior``, the number
    of samples N that the source statistics count for: N/(N+n) * source + n/(N+n) * batch (Schneider et al. 2020).
    Infinity is the source's alone; 0 is the batch's alone, which takes the running statistics away: with none to use,
    PyTorch normalizes by the batch in eval mode too (``track_running_stats=False`` alone would not do that).
    """

    def __init__(self, net: nn.Module, owner: str, prior: float) -> None:
        require_unwrapped(net)
        self._net = weakref.ref(net)
        self._modes = [(module, module.training) for module in net.modules()]
        self._flags = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
        self._statistics: list[tuple[_NormBase, dict[str, Any]]] = []
        self._hooks: list[RemovableHandle] = []
        #: n in the mixture; None: the length of the batch at hand
        self.samples: int | None = None
        #: whether the mixture is on; eata.Window makes its own
        self.mixing = True
        _wrapped[net] = owner
        net.eval()
        net.requires_grad_(False)
        for module in net.modules():
            if isinstance(module, _NormBase) and module.running_mean is not None:
                if prior == 0:
                    kept = {
                        name: getattr(module, name) for name in ("running_mean", "running_var", "track_running_stats")
                    }
                    self._statistics.append((module, kept))
                elif prior < math.inf and isinstance(module, _BatchNorm):
                    self._mix(module, prior)
        self._take_statistics()

    def _mix(self, layer: _BatchNorm, prior: float) -> None:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        source = (layer.running_mean, layer.running_var)

        def mix(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self.mixing:
                layer.running_mean, layer.running_var = mixed_statistics(inputs[0], source, prior, self.samples)

        def put_back(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            layer.running_mean, layer.running_var = source

        self._hooks.append(layer.register_forward_pre_hook(mix))
        self._hooks.append(layer.register_forward_hook(put_back, always_call=True))

    def _take_statistics(self) -> None:
        for module, _ in self._statistics:
            module.running_mean = module.running_var = None
            module.track_running_stats = False

    def _give_statistics(self) -> None:
        for module, kept in self._statistics:
            for name, value in kept.items():
                setattr(module, name, value)

    @contextlib.contextmanager
    def source_statistics(self) -> Iterator[None]:
        """The net with its running statistics, for as long as the block lasts."""
        self._give_statistics()
        try:
            yield
        finally:
            self._take_statistics()

    def restore(self) -> None:
        """Put flags, modes and statistics back as they were."""
        self._give_statistics()
        for hook in self._hooks:
            hook.remove()
        for module, training in self._modes:
            module.training = training
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        net = self._net()
        if net is not None:
            _wrapped.pop(net, None)


def mixed_statistics(
    x: Tensor, source: tuple[Tensor, Tensor], prior: float, samples: int | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance N/(N+n) * source + n/(N+n) * batch, by channel (Schneider et al. 2020).

    Args:
        x: a BatchNorm layer's input, (n, C, ...). No gradient flows through its statistics.
        source: running mean and variance of the source model, (C,) each.
        prior: N, in samples.
        samples: what the batch counts for, n; default its length.

    >>> mean, variance = mixed_statistics(torch.tensor([[1.0], [3.0]]), (torch.zeros(1), torch.zeros(1)), prior=2)
    >>> mean, variance
    (tensor([1.]), tensor([0.5000]))
    """
    share = prior / (prior + (len(x) if samples is None else samples))
    source_mean, source_variance = source
    # The variance is the biased one, by which a batch is normalized: N = 0 is then exactly batch statistics.
    mean, variance = batch_statistics(x.detach().to(torch.promote_types(x.dtype, source_mean.dtype)))
    return (
        share * source_mean + (1 - share) * mean.to(source_mean.dtype),
        share * source_variance + (1 - share) * variance.to(source_variance.dtype),
    )


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (biased) over all samples, (C,) each, of x (n, C, ...).

    >>> batch_statistics(torch.tensor([[1.0], [3.0]]))
    (tensor([2.]), tensor([1.]))
    """
    if x.is_contiguous() or x.device.type != "cpu":
        return pooled(*sample_moments(x))
    # Pixel by pixel, PyTorch's own are fast; not every device has them.
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    return mean, variance


def sample_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (biased) of each sample's channels, (n, C) each, of x (n, C, ...).

    >>> sample_moments(torch.tensor([[[1.0, 3.0]], [[4.0, 4.0]]]))
    (tensor([[2.],
            [4.]]), tensor([[1.0000e+00],
            [1.0000e-06]]))
    """
    means, inverse = inverse_moments(x)
    return means, inverse.reciprocal_()


def inverse_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `sample_moments`, with one over the standard deviation."""
    count, channels = x.shape[:2]
    # GroupNorm with a channel a group gives both in one pass, at a tenth of the time of torch.var_mean.
    values = x.numel() // (count * channels)
    _, means, inverse = torch.native_group_norm(x.contiguous(), None, None, count, channels, values, channels, TINY)
    return means, inverse


def pooled(means: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all samples, (C,) each, from those of each sample, (n, C).

    >>> pooled(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [2.0]]))
    (tensor([2.]), tensor([3.]))
    """
    return means.mean(0), deviations.square().mean(0).add_(means.var(0, correction=0))


def check(net: nn.Module) -> list[str]:
    """What would go wrong when this model is adapted, one plain sentence for each finding; [] when nothing.

    Args:
        net: the model that you would give to ``eata.EATA``.

    >>> check(nn.Sequential(nn.Linear(4, 3)))[0]
    'There is no normalization layer, so there is nothing to adapt; only eata.Source, Augment and MEMO work.'
    """
    return [*_layer_findings(net), *_tensor_findings(net), *_wrapper_findings(net)]


def _layer_findings(net: nn.Module) -> list[str]:
    layers = normalization_layers(net)
    if not layers:
        return [
            "There is no normalization layer, so there is nothing to adapt; only eata.Source, Augment and MEMO work."
        ]
    findings = []
    if not affine_parameters(net):
        findings.append(
            "No normalization layer has a scale or shift (affine=False), so there is nothing to adapt; eata.BN works."
        )
    bare = [n for n, m in layers.items() if isinstance(m, _BatchNorm) and m.running_mean is None]
    if bare:
        findings.append(
            f"BatchNorm '{bare[0]}' (and {len(bare) - 1} more) has no running statistics, so there are none of the "
            "source: eata.Source uses each batch's own already, and eata.BN and Window can't be used."
        )
    weights = [m for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    if weights and (classes := int(weights[-1].weight.shape[0])) < 2:
        findings.append(
            f"The last layer has {classes} output: entropy needs at least 2 classes (make a sigmoid output two logits)."
        )
    return findings


def _tensor_findings(net: nn.Module) -> list[str]:
    findings = []
    parameters = dict(net.named_parameters())
    half = [n for n, p in parameters.items() if p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        findings.append(
            f"'{half[0]}' is {parameters[half[0]].dtype}: small steps vanish in half precision; "
            "keep the weights in float32 and use torch.autocast."
        )
    inference = [n for n, p in parameters.items() if p.is_inference()]
    if inference:
        findings.append(
            f"'{inference[0]}' was made under torch.inference_mode and can't be trained; build the net outside of it."
        )
    broken = [n for n, p in parameters.items() if not p.is_meta and not torch.isfinite(p.detach()).all()]
    if broken:
        findings.append(f"'{broken[0]}' holds NaN or infinity; load the weights again.")
    devices = sorted({str(p.device) for p in parameters.values()})
    if "meta" in devices:
        findings.append("Some weights are on the meta device and have no values; load the weights first.")
    elif len(devices) > 1:
        findings.append(
            f"The weights are on {len(devices)} devices ({', '.join(devices)}); move the net to one of them."
        )
    return findings


def _wrapper_findings(net: nn.Module) -> list[str]:
    findings = []
    if hasattr(net, "_orig_mod"):
        findings.append(
            "This is a compiled model: it adapts with backward='full' only, and recompiles when wrapped; "
            "give eata the plain net for the fast backward."
        )
    if isinstance(net, torch.jit.ScriptModule):
        findings.append(
            "This is a TorchScript model: its normalization layers can't be found; give eata the plain net."
        )
    if isinstance(net, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        findings.append(
            "This is a data-parallel wrapper: each replica would use its own statistics; give eata net.module."
        )
    if net in _wrapped:
        findings.append(f"This net is wrapped by {_wrapped[net]} already; call unwrap() on that first.")
    return findings
