"""Where the last stage of a net begins, told by its structure and not by names (SAR and DeYO leave it alone)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from eata import norm
from eata.errors import EataError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def last_stage(net: nn.Module) -> list[str]:
    """Names of the normalization layers from the last stage on, in the order of registration; none if there is none.

    A net's blocks are the innermost modules, with normalization in them, of the kind that occurs most often. Where they
    grow wider from stage to stage (ResNet, Swin, ConvNeXt), the last stage is the run of blocks as wide as the last
    one. Where all are alike (ViT), it is the last quarter of them. What leads into its first block (downsampling) and
    what follows (the final norm) belong to it.

    >>> class Block(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
    >>> last_stage(nn.Sequential(Block(4), Block(4), Block(8), nn.LayerNorm(8)))
    ['2.norm', '3']
    """
    blocks = _blocks(net)
    if len(blocks) < 2:
        return []
    widths = [_width(block) for block in blocks.values()]
    tail = len(blocks)
    if len(set(widths)) == 1:
        tail -= -(-len(blocks) // 4)
    else:
        while widths[tail - 1] == widths[-1]:
            tail -= 1
    names = list(blocks)
    begin = _outermost(names[tail], names[:tail])
    layers = list(norm.normalization_layers(net))
    first = next(place for place, name in enumerate(layers) if name.startswith(begin + "."))
    return layers[first:]


def affine_parameters(
    net: nn.Module, layers: int | None, exclude: Sequence[str] | None, owner: str
) -> dict[str, nn.Parameter]:
    """Scale and shift of the normalization layers but those of the last stage.

    Args:
        net: the model.
        layers: only the last so many normalization layers, whatever stage they are in; None: by ``exclude``.
        exclude: names of modules that stay fixed, such as ``("layer4",)``; None: the last stage.
        owner: who asks.
    """
    free = norm.affine_parameters(net, layers)
    if layers is not None and exclude is None:
        return free
    fixed = last_stage(net) if exclude is None else list(exclude)
    if exclude is None and not fixed:
        raise EataError(
            f"{owner} leaves the last stage of a net alone, and this one shows no stages; say which modules stay as "
            "they are, exclude=('name', ...), or exclude=() for none."
        )
    modules = dict(net.named_modules())
    for name in fixed:
        if name not in modules:
            raise EataError(f"exclude names {name!r}, and the net has no such module; see net.named_modules().")
    return {name: p for name, p in free.items() if not any(name.startswith(module + ".") for module in fixed)}


def _blocks(net: nn.Module) -> dict[str, nn.Module]:
    """The net's blocks by name."""
    normed = {
        name: module
        for name, module in net.named_modules()
        if name
        and type(module) not in CONTAINERS
        and not isinstance(module, norm.LAYERS)
        and norm.normalization_layers(module)
    }
    innermost = {
        name: module for name, module in normed.items() if not any(other.startswith(name + ".") for other in normed)
    }
    kinds = Counter(type(module) for module in innermost.values())
    if not kinds:
        return {}
    ((kind, _),) = kinds.most_common(1)
    return {name: module for name, module in innermost.items() if type(module) is kind}


def _width(block: nn.Module) -> int:
    """The most outputs of any of its layers."""
    return max(parameter.shape[0] for parameter in block.parameters() if parameter.dim())


def _outermost(name: str, others: Sequence[str]) -> str:
    """The largest module that holds the block ``name`` and none of the others."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        around = ".".join(parts[:length])
        if not any(other.startswith(around + ".") for other in others):
            return around
    return name
