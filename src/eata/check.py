"""What would go wrong when a model is adapted, in plain words."""

from __future__ import annotations

import sys

import torch
from torch import nn

from eata import norm


def check(net: nn.Module) -> list[str]:
    """What would go wrong when this model is adapted, one plain sentence for each finding; [] when nothing.

    Args:
        net: the model that you would give to ``eata.EATA``.

    >>> check(nn.Sequential(nn.Linear(4, 3)))[0]
    'There is no normalization layer, so there is nothing to adapt; only eata.Source, Augment and MEMO work.'
    """
    hidden = hides_layers(net)
    return [*([hidden] if hidden else _layer_findings(net)), *_tensor_findings(net), *_wrapper_findings(net)]


def hides_layers(net: nn.Module) -> str | None:
    """Why the normalization layers of a net, or their weights, can't be seen; None where they can."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in net.modules()):
        return "This is a TorchScript model: its normalization layers can't be found; give eata the plain net."
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it, no net is of its classes
    kinds = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp else ()
    if any(isinstance(module, kinds) for module in net.modules()):
        return "This is an FSDP wrapper: its weights are in pieces; give eata the whole net."
    return None


def nothing_to_adapt(net: nn.Module) -> str:
    """Why a net has no scale and shift to adapt."""
    return hides_layers(net) or next(iter(_layer_findings(net)), "Its normalization layers were all left out.")


def _layer_findings(net: nn.Module) -> list[str]:
    layers = norm.normalization_layers(net)
    if not layers:
        return [
            "There is no normalization layer, so there is nothing to adapt; only eata.Source, Augment and MEMO work."
        ]
    findings = []
    if not norm.affine_parameters(net):
        findings.append(
            "No normalization layer has a scale or shift (affine=False), so there is nothing to adapt; eata.BN works."
        )
    bare = [n for n, m in layers.items() if isinstance(m, norm.BatchNorm) and m.running_mean is None]
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
    if norm.is_compiled(net):
        findings.append(
            "This is a compiled model: it adapts with backward='full' only, and recompiles when wrapped; "
            "give eata the plain net for the fast backward."
        )
    if isinstance(net, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        findings.append(
            "This is a data-parallel wrapper: each replica would use its own statistics; give eata net.module."
        )
    owner = norm.wrapped_by(net)
    if owner is not None:
        findings.append(f"This net is wrapped by {owner} already; call unwrap() on that first.")
    return findings
