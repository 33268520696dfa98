"""Where the last stage begins, in other people's nets and in ours."""

import pytest
import timm
from benchmarks.nets import resnet50
from torch import nn

import eata
from eata import norm
from eata.models import ResNet26
from eata.stages import affine_parameters, last_stage


def within(*modules):
    return lambda name: name.startswith(modules)


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("resnet18", within("layer4.")),
        ("resnet10t", within("layer4.")),
        ("resnet50", within("layer4.")),
        ("resnet50_gn", within("layer4.")),
        ("resnetv2_50", within("stages.3.", "norm")),
        ("wide_resnet50_2", within("layer4.")),
        ("vit_tiny_patch16_224", within("blocks.9.", "blocks.10.", "blocks.11.", "norm", "fc_norm")),
        ("deit_tiny_patch16_224", within("blocks.9.", "blocks.10.", "blocks.11.", "norm", "fc_norm")),
        ("swin_tiny_patch4_window7_224", within("layers.3.", "norm")),
        ("convnext_atto", within("stages.3.", "head.norm", "norm_pre")),
        ("convnext_tiny", within("stages.3.", "head.norm", "norm_pre")),
    ],
)
def test_the_last_stage_of_timms_nets(name, belongs):
    net = timm.create_model(name, pretrained=False)
    layers = list(norm.normalization_layers(net))
    want = [layer for layer in layers if belongs(layer)]
    assert last_stage(net) == want
    assert 0 < len(want) < len(layers)


@pytest.mark.parametrize("kind", ["bn", "gn"])
@pytest.mark.parametrize("rotation", [False, True])
def test_the_last_stage_of_ours(kind, rotation):
    net = ResNet26(10, kind, rotation)
    want = [name for name in norm.normalization_layers(net) if name.startswith(("head.", "rotation_head."))]
    assert last_stage(net) == want


def test_names_do_not_matter():
    net = resnet50()  # one flat Sequential
    want = [name for name in norm.normalization_layers(net) if int(name.split(".")[0]) >= 17]
    assert last_stage(net) == want
    assert len(want) == 3 * 3 + 1


def test_sar_and_deyo_leave_it_alone():
    for method in (eata.SAR, eata.DeYO):
        net = ResNet26(10, "gn")
        model = method(net)
        assert not any(name.startswith("head.") for name in model.parameters)
        assert len(model.parameters) == 2 * 16
        model.unwrap()
        assert list(method(net, exclude=["stage1"]).unwrap().state_dict()) == list(net.state_dict())


def test_exclude_and_layers_say_otherwise():
    net = ResNet26(10, "bn")
    everything = affine_parameters(net, None, (), "eata.SAR")
    assert len(everything) == len(norm.affine_parameters(net))
    some = affine_parameters(net, None, ("stage1", "head.norm"), "eata.SAR")
    assert set(everything) - set(some) == {n for n in everything if n.startswith(("stage1.", "head.norm."))}
    assert list(affine_parameters(net, 2, None, "eata.SAR")) == list(norm.affine_parameters(net, 2))
    with pytest.raises(ValueError, match="no such module"):
        affine_parameters(net, None, ("layer4",), "eata.SAR")


def test_a_net_without_stages_says_what_to_do():
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    assert last_stage(net) == []
    with pytest.raises(ValueError, match=r"exclude=\(\)"):
        eata.SAR(net)
    assert list(eata.SAR(net, layers=1).parameters) == ["1.weight", "1.bias"]
