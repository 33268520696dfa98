"""The lean forward pass: the same gradient, less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eata import allocator, rows
from eata.models.resnet26 import ResNet26
from rows.test_rows import by_batch, forward, norm_parameters, sharp, vector


def net_of(norm: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 3, padding=1, groups=2), norm(4), nn.ReLU(), nn.Conv2d(4, 6, (3, 1), stride=2, dilation=(1, 2)),
        norm(6), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


class Group(nn.GroupNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(2, channels)


def frozen(net: nn.Module) -> list[Tensor]:
    net.double().eval().requires_grad_(False)
    return [p.requires_grad_(True) for p in norm_parameters(net)]


def gradient(net: nn.Module, x: Tensor, index: Tensor, parameters: list[Tensor], lean: bool) -> Tensor:
    engine = rows.Engine(lean)
    found = vector(forward(engine, net, x, parameters).gradients(index, sharp))
    assert not engine.failed
    return found


@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize("large", [1, 2**20])  # bytes from which on tensors have memory of their own
def test_gradient_is_unchanged(count: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "LARGE", large)
    net = net_of(Group)
    parameters = frozen(net)
    x, index = torch.randn(10, 3, 16, 16).double(), torch.arange(count)
    textbook = vector(torch.autograd.grad(sharp(net(x)[index]), parameters))
    for layout in (torch.contiguous_format, torch.channels_last):
        ours = gradient(net, x.to(memory_format=layout), index, parameters, lean=True)
        assert (ours - textbook).abs().max() < 1e-10


@pytest.mark.parametrize("count", [8, 32])
def test_sixteen_bits_of_batch_norm_input_cost_less_than_one_percent(count: int) -> None:
    net = by_batch(ResNet26(10, "bn"))
    frozen(net)
    parameters = norm_parameters(net.float())
    x, index = torch.randn(32, 3, 16, 16), torch.arange(count)
    exact = gradient(net, x, index, parameters, lean=False)
    ours = gradient(net, x, index, parameters, lean=True)
    assert (ours - exact).norm() < 0.01 * exact.norm()


def saved_bytes(net: nn.Module, x: Tensor, lean: bool) -> int:
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        logits = forward(rows.Engine(True), net, x, norm_parameters(net)) if lean else net(x)
    del logits
    return sum(size for at, size in seen.items() if at not in own)


def test_less_than_half_is_kept() -> None:
    net = by_batch(ResNet26(10, "bn")).float()
    frozen(net)
    net.float()
    x = torch.randn(16, 3, 32, 32)
    assert saved_bytes(net, x, lean=True) < 0.45 * saved_bytes(net, x, lean=False)


def test_trainable_convolutions_are_left_alone() -> None:
    net = net_of(Group).double()
    parameters: list[Tensor] = list(net.parameters())
    x, index = torch.randn(6, 3, 16, 16).double(), torch.tensor([0, 4])
    textbook = vector(torch.autograd.grad(sharp(net(x)[index]), parameters))
    assert (gradient(net, x, index, parameters, lean=True) - textbook).abs().max() < 1e-10


def test_autocast_works() -> None:
    net = by_batch(net_of(nn.BatchNorm2d))
    frozen(net)
    net.float()
    x = torch.randn(8, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradient(net, x, torch.tensor([1, 2]), norm_parameters(net), lean=True)
    assert torch.isfinite(found).all()
