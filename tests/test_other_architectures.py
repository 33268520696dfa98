"""Models from elsewhere: timm's resnet, efficientnet, convnext and vit (small ones, random weights)."""

import copy

import pytest
import torch
from torch import nn

import eata

timm = pytest.importorskip("timm", reason="timm is in the dev extra; make setup installs it")

ARCHITECTURES = ["test_resnet", "test_efficientnet", "test_convnext", "test_vit", "resnet18"]


@pytest.mark.parametrize("backward", ["full", "rows"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_right_parameters_change_and_no_others(name, backward):
    net = timm.create_model(name, num_classes=10, drop_rate=0.3).train()
    for parameter in net.parameters():
        if parameter.dim() == 1:  # scales that start at zero would stop the gradient
            nn.init.normal_(parameter, 1.0, 0.2)
    before = copy.deepcopy(net.state_dict())
    affine = {
        f"{module}.{kind}"
        for module, layer in net.named_modules()
        if isinstance(layer, (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm))
        for kind in ("weight", "bias")
    }
    side = 160 if "vit" in name else 64
    x = torch.randn(4, 3, side, side)
    model = eata.EATA(net, eata.fisher(net, x), e0=1.0, epsilon=1.0, lr=0.5, backward=backward)
    assert set(model.parameters) == affine
    first = model(x)
    assert first.shape == (4, 10)
    assert model.stats.steps == 1
    model.unwrap()
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert changed <= affine
    assert len(changed) > 0.9 * len(affine)


def test_dropout_and_stochastic_depth_stay_asleep():
    net = timm.create_model("test_efficientnet", num_classes=10, drop_rate=0.5, drop_path_rate=0.5).train()
    model = eata.Tent(net)
    x = torch.randn(4, 3, 64, 64)
    with model.frozen():
        assert torch.equal(model(x), model(x))
