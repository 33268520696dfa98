"""Statistics mixed of source and batch: values and gradients against loops over numbers in double precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eata import norm, rows
from eata.inputs import Inputs
from eata.mixture import Given, batch_norm
from eata.models.resnet26 import ResNet26
from eata.norm import Statistics
from eata.passes import Runner
from eata.rows import batchnorm
from eata.rows.gradient import Place, RowGradient, Rows
from rows.test_rows import norm_parameters, prepared, sharp, vector

EPS = 1e-3
SHAPES = [(6, 3), (5, 2, 4), (5, 2, 3, 3), (4, 2, 2, 2, 3)]  # BatchNorm1d (two kinds), 2d, 3d
SHARES = [0.0, 0.2, 0.5, 0.9, 1.0]


def loops(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, share: float, g: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """BatchNorm by the mixture, and the gradients of sum(g * y) by x, weight and bias: the whole Jacobian, term by
    term, in Python's numbers."""
    channels = x.shape[1]
    by_channel = x.movedim(1, 0).reshape(channels, -1).tolist()
    g_by_channel = g.movedim(1, 0).reshape(channels, -1).tolist()
    ys, dxs, dweight, dbias = [], [], [], []
    for c in range(channels):
        values, back = by_channel[c], g_by_channel[c]
        count = len(values)
        own_mean = sum(values) / count
        own_variance = sum((v - own_mean) ** 2 for v in values) / count
        m = share * float(mean[c]) + (1 - share) * own_mean
        s = (share * float(variance[c]) + (1 - share) * own_variance + EPS) ** 0.5
        w, b = float(weight[c]), float(bias[c])
        ys.append([w * (v - m) / s + b for v in values])
        dweight.append(sum(d * (v - m) / s for d, v in zip(back, values, strict=True)))
        dbias.append(sum(back))
        dx = []
        for j in range(count):
            dm = (1 - share) / count  # of the mixed mean by value j
            ds = (1 - share) * (values[j] - own_mean) / count / s  # of the mixed deviation by value j
            total = 0.0
            for k in range(count):
                total += back[k] * w * (((j == k) - dm) / s - (values[k] - m) * ds / s**2)
            dx.append(total)
        dxs.append(dx)
    moved = (channels, x.shape[0], *x.shape[2:])

    def shaped(rows_of_numbers: list[list[float]]) -> Tensor:
        return torch.tensor(rows_of_numbers, dtype=torch.float64).view(moved).movedim(0, 1)

    vectors = torch.tensor([dweight, dbias], dtype=torch.float64)
    return shaped(ys), shaped(dxs), vectors[0], vectors[1]


def layer_input(shape: tuple[int, ...], channels_last: bool = False) -> tuple[Tensor, ...]:
    """x, weight, bias, the source's mean and variance, and a gradient of the output; none of them special."""
    torch.manual_seed(0)
    x, channels = 2 * torch.randn(shape).double() + 1, shape[1]
    if channels_last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    weight, bias, mean = torch.randn(3, channels).double()
    return x, weight, bias, mean, torch.rand(channels).double() + 0.5, torch.randn(shape).double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_one_layer_is_the_loops(shape: tuple[int, ...], share: float, watched: bool, channels_last: bool) -> None:
    x, weight, bias, mean, variance, g = layer_input(shape, channels_last)
    inputs = [t.clone().requires_grad_(True) for t in (x, weight, bias)]
    mode = rows.Watch([], Statistics(0)) if watched else norm.Normalizing([], Statistics(0))
    y = mode.batch_norm(*inputs, EPS, Given(share, mean, variance))
    found = (y.detach(), *torch.autograd.grad(y, inputs, g))
    for ours, expected in zip(found, loops(x, weight, bias, mean, variance, share, g), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-9)


def test_gradient_can_be_differentiated_again() -> None:
    x, weight, bias, mean, variance, _ = layer_input((4, 2, 3))
    inputs = [t.clone().requires_grad_(True) for t in (x, weight, bias)]
    assert torch.autograd.gradgradcheck(lambda *t: batch_norm(*t, EPS, Given(0.4, mean, variance)), inputs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", SHARES[:-1])
def test_lean_differs_by_the_rounding_of_sixteen_bits(shape: tuple[int, ...], share: float) -> None:
    x, weight, bias, mean, variance, g = layer_input(shape)
    inputs = [t.clone().requires_grad_(True) for t in (x, weight, bias)]
    y = rows.Watch([], Statistics(0), keep_less=True).batch_norm(*inputs, EPS, Given(share, mean, variance))
    found = (y.detach(), *torch.autograd.grad(y, inputs, g))
    for ours, expected in zip(found, loops(x, weight, bias, mean, variance, share, g), strict=True):
        torch.testing.assert_close(ours, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("lean", [False, True])
def test_rule_for_some_rows_is_the_equation(share: float, lean: bool) -> None:
    """Each stored row counts for its weight in what mean and variance send back."""
    x, scale, bias, mean, variance, _ = layer_input((6, 2, 3, 3))
    kept, weight = torch.tensor([0, 2, 5]), torch.tensor([1.5, 3.0, 1.5]).double()
    g = torch.randn(3, 2, 3, 3).double()
    leaf = x.clone().requires_grad_(True)
    y = batchnorm.BatchNorm.apply(leaf, scale, bias, EPS, Given(share, mean, variance), None, lean)
    (dx,) = torch.autograd.grad(y, leaf, RowGradient(g, Rows(kept, 6, weight), Place()))
    expected = torch.empty_like(g)
    count = 6 * 9
    for c in range(2):
        own_mean, own_variance = x[:, c].mean(), x[:, c].var(correction=0)
        m = share * mean[c] + (1 - share) * own_mean
        s = (share * variance[c] + (1 - share) * own_variance + EPS).sqrt()
        normalized = (x[kept, c] - m) / s
        for k in range(3):
            centred = (x[kept[k], c] - own_mean) / s
            back = (1 - share) / count * (g[:, c].sum() + centred * (g[:, c] * normalized).sum())
            expected[k, c] = scale[c] / s * (g[k, c] - weight[k] * back)
    tolerance = 5e-3 if lean else 1e-10
    torch.testing.assert_close(dx.kept, expected, atol=tolerance, rtol=tolerance)


# --- whole nets -------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A BatchNorm layer by the mixture, channel by channel; autograd does the rest."""

    def __init__(self, layer: nn.Module, share: float) -> None:
        super().__init__()
        self.layer, self.share = layer, share

    def forward(self, x: Tensor) -> Tensor:
        layer, share, channels = self.layer, self.share, []
        for c in range(x.shape[1]):
            values = x[:, c]
            own = values.sum() / values.numel()
            mean = share * layer.running_mean[c] + (1 - share) * own
            variance = share * layer.running_var[c] + (1 - share) * (values - own).pow(2).sum() / values.numel()
            channels.append((values - mean) / (variance + layer.eps).sqrt() * layer.weight[c] + layer.bias[c])
        return torch.stack(channels, 1)


def plainly(net: nn.Module, share: float) -> nn.Module:
    """A copy with `Plain` layers; its parameters come in the same order."""
    net = copy.deepcopy(net)
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(module, name, Plain(child, share))
    return net


def moved_off_source(net: nn.Module) -> nn.Module:
    """Running statistics unlike those of a new layer."""
    generator = torch.Generator().manual_seed(3)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean += 0.3 * torch.randn(module.num_features, generator=generator)
            module.running_var *= 0.5 + torch.rand(module.num_features, generator=generator)
    return net


NETS = {
    "1d": (nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4)), (7,)),
    "2d": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
                         nn.Flatten(), nn.Linear(16, 4)), (3, 6, 6)),
    "3d": (nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 3, 2), nn.BatchNorm3d(3),
                         nn.Flatten(), nn.Linear(24, 4)), (2, 4, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("prior", [0, 3, 12, 200])
@pytest.mark.parametrize("count", [1, 4, 12])
def test_full_gradient_of_chosen_rows_is_the_plain_one(kind: str, prior: float, count: int) -> None:
    base, shape = NETS[kind]
    net, parameters = prepared(moved_off_source(copy.deepcopy(base)))
    x, chosen = torch.randn(12, *shape).double(), torch.randperm(12)[:count]
    batch = Runner(net)(Inputs(x), Statistics(prior), parameters)
    plain = plainly(net, prior / (prior + 12))
    logits = plain(x)
    torch.testing.assert_close(batch.logits, logits.detach(), atol=1e-10, rtol=1e-10)
    expected = torch.autograd.grad(sharp(logits[chosen]), norm_parameters(plain))
    for ours, theirs in zip(batch.gradients(chosen, sharp), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("prior", [3, 12, 200])
def test_rows_with_every_row_stored_is_the_plain_gradient(kind: str, prior: float) -> None:
    base, shape = NETS[kind]
    net, parameters = prepared(moved_off_source(copy.deepcopy(base)))
    x, chosen = torch.randn(12, *shape).double(), torch.tensor([1, 4, 5])
    with rows.Watch(norm.batch_norm_layers(net), Statistics(prior)):
        logits = net(x)
    every = Rows(torch.arange(12), 12, torch.ones(12))
    ours = torch.autograd.grad(sharp(rows.select_rows(logits, chosen, every)), parameters)
    plain = plainly(net, prior / (prior + 12))
    expected = torch.autograd.grad(sharp(plain(x)[chosen]), norm_parameters(plain))
    assert (vector(ours) - vector(expected)).abs().max() < 1e-9 * max(1.0, float(vector(expected).abs().max()))


@pytest.mark.parametrize("prior", [16, 64])
@pytest.mark.parametrize("lean", [False, True])
def test_rows_with_stand_ins_come_near_the_plain_gradient(prior: float, lean: bool) -> None:
    net, parameters = prepared(moved_off_source(ResNet26(10, "bn")))
    x = torch.randn(32, 3, 8, 8).double()
    plain = plainly(net, prior / (prior + 32))
    logits = plain(x)
    for count in (4, 12):
        engine, chosen = rows.Engine(lean), torch.arange(count)
        ours = vector(Runner(net, engine)(Inputs(x), Statistics(prior), parameters).gradients(chosen, sharp))
        assert engine.rows is not None
        grown = torch.autograd.grad(sharp(logits[chosen]), norm_parameters(plain), retain_graph=True)
        assert F.cosine_similarity(ours, vector(grown), 0) > 0.9
        assert 0.6 < ours.norm() / vector(grown).norm() < 1.3
