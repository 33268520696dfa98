from __future__ import annotations

import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from eata.models import load
from eata.models.zoo import IMAGENET_MEAN

FACTORY = """
import torch
def make(num_classes=2):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, num_classes)).train()
    net.pretrained_cfg = {"mean": (0.1,) * 3, "std": (0.2,) * 3, "input_size": (3, 8, 8), "num_classes": num_classes}
    return net
def bare():
    return torch.nn.Linear(3, 2)
def wrong():
    return "net"
def broken():
    raise KeyError("weights")
def silent():
    return torch.nn.Flatten()
def partly():
    net = torch.nn.Linear(3, 2)
    net.pretrained_cfg = {"num_classes": 2, "mean": (0.1,) * 3}
    return net
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module in the folder where the command is run."""
    (tmp_path / "my_nets.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_nets", None)


def source_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_own_factory(own):
    net = load("my_nets:make")
    assert net.pretrained_cfg["mean"] == (0.1,) * 3
    assert not net.training
    assert load("my_nets:make", classes=5)[1].out_features == 5
    assert str(own) not in sys.path


def test_a_net_that_does_not_tell_its_normalization(own):
    with pytest.warns(UserWarning, match="ImageNet's mean and standard deviation are assumed"):
        net = load("my_nets:bare")
    assert net.pretrained_cfg["mean"] == IMAGENET_MEAN
    assert net.pretrained_cfg["num_classes"] == 2


def test_a_net_that_does_not_tell_its_classes(own):
    with (
        pytest.warns(UserWarning, match="ImageNet's"),
        pytest.raises(ValueError, match="silent does not say its num_classes"),
    ):
        load("my_nets:silent")


@pytest.mark.parametrize("form", ["safetensors", "plain", "state_dict", "model", "module", "both"])
def test_weights_in_every_usual_form(own, form):
    trained = source_net()
    state = trained.state_dict()
    prefixed = {f"module.{name}": value for name, value in state.items()}
    path = own / "weights.safetensors"
    if form == "safetensors":
        save_file(state, path)
    else:
        content = {
            "plain": state,
            "state_dict": {"state_dict": state, "epoch": 3},
            "model": {"model": state},
            "module": prefixed,
            "both": {"state_dict": prefixed},
        }[form]
        path = own / "weights.pth"
        torch.save(content, path)
    net = load("my_nets:make", weights=path)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())


def test_a_mismatch_names_the_first_keys(own):
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    torch.save(other.state_dict(), own / "w.pth")
    expected = (
        r"w.pth does not fit the model: it lacks 1.bias; it has 2.weight, 2.bias; "
        r"other shapes: 0.weight \(5, 3\) for \(4, 3\), 0.bias \(5,\) for \(4,\)\."
    )
    with pytest.raises(ValueError, match=expected):
        load("my_nets:make", weights=own / "w.pth")
    many = {f"layer{number}": torch.zeros(1) for number in range(9)}
    save_file({**source_net().state_dict(), **many}, own / "w.safetensors")
    with pytest.raises(ValueError, match="it has layer0, layer1, layer2 and 6 more"):
        load("my_nets:make", weights=own / "w.safetensors")


class Evil:
    def __reduce__(self):
        return (sys.exit, ("this code ran",))


def test_unsafe_and_damaged_weights(own):
    torch.save({"state_dict": Evil()}, own / "evil.pth")
    with pytest.raises(ValueError, match="holds more than tensors, which could run code"):
        load("my_nets:make", weights=own / "evil.pth")
    torch.save({"weights": [1, 2]}, own / "list.pt")
    with pytest.raises(ValueError, match="holds no state dict"):
        load("my_nets:make", weights=own / "list.pt")
    (own / "cut.pth").write_bytes((own / "list.pt").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"cut.pth is damaged"):
        load("my_nets:make", weights=own / "cut.pth")
    (own / "cut.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load("my_nets:make", weights=own / "cut.safetensors")
    with pytest.raises(FileNotFoundError, match="no file of weights"):
        load("my_nets:make", weights=own / "missing.pth")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet26-bn-digit", "did you mean 'resnet26-bn-digits'"),
        ("wholly different", "there are: .*resnet26-bn-digits"),
        ("no_such_module:make", "cannot be imported: No module named 'no_such_module'"),
        ("my_nets:nothing", "has no attribute 'nothing'"),
        ("json:dumps", "json:dumps cannot be called as a factory of models"),
        ("my_nets:wrong", "gives a str, not a torch.nn.Module"),
        ("my_nets:broken", "my_nets:broken could not make a model: KeyError: 'weights'"),
        ("my_nets:partly", "my_nets:partly does not say its std"),
        ("slip:net", "slip:net cannot be imported: .*slip.py, line 1"),
    ],
)
def test_bad_names(own, name, message):
    (own / "slip.py").write_text("def net(:\n")
    with pytest.raises(ValueError, match=message):
        load(name)


def test_another_number_of_classes():
    with pytest.raises(ValueError, match="resnet26-bn-digits has 10 classes, not 7"):
        load("resnet26-bn-digits", classes=7)


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_packages_that_are_missing(monkeypatch, name):
    for module in (name, "torchvision.models"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{name}.* cannot be imported .* `pip install 'eata\[vision\]'`"):
        load(f"{name}/resnet50")


def test_a_package_that_fails_on_import(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"timm cannot be imported \(operator torchvision::nms does not exist\)"):
        load("timm/resnet50")


@pytest.fixture
def timm(monkeypatch):
    module = types.ModuleType("timm")

    def create_model(name, pretrained, num_classes=2):
        if pretrained:
            raise OSError("no network\nat all")
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, num_classes))
        net.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "num_classes": num_classes}
        return net

    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)


def test_timm(timm, tmp_path):
    with pytest.raises(ValueError, match=r"vit could not be built: no network at all\. Without a network give weights"):
        load("timm/vit")
    save_file(source_net().state_dict(), tmp_path / "w.safetensors")
    assert load("timm/vit", weights=tmp_path / "w.safetensors").pretrained_cfg["mean"] == (0.5,) * 3


def test_torchvision(monkeypatch, tmp_path):
    """The part of torchvision that is used, as it is documented; torchvision itself has no build for every torch."""
    bicubic = types.SimpleNamespace(value="bicubic")
    preparation = types.SimpleNamespace(
        mean=[0.4] * 3, std=[0.3] * 3, crop_size=[64], resize_size=[80], interpolation=bicubic
    )
    published = types.SimpleNamespace(transforms=lambda: preparation, meta={"categories": ["a", "b"]})
    models = types.ModuleType("torchvision.models")
    models.get_model = lambda name, weights, num_classes=2: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, num_classes))
    models.get_model_weights = lambda name: types.SimpleNamespace(DEFAULT=published)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    net = load("torchvision/resnet18")
    assert net.pretrained_cfg == {
        "mean": (0.4,) * 3,
        "std": (0.3,) * 3,
        "input_size": (3, 64, 64),
        "num_classes": 2,
        "label_names": ("a", "b"),
        "crop_pct": 0.8,
        "interpolation": "bicubic",
    }
    save_file(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).state_dict(), tmp_path / "w.safetensors")
    net = load("torchvision/resnet18", weights=tmp_path / "w.safetensors", classes=5)
    assert net.pretrained_cfg["num_classes"] == 5


def test_a_real_timm_model_with_other_classes_and_weights(tmp_path):
    library = pytest.importorskip("timm", reason="timm is not installed: pip install 'eata[vision]'")
    trained = library.create_model("resnet18", pretrained=False, num_classes=10)
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    net = load("timm/resnet18", weights=tmp_path / "w.safetensors", classes=10)
    assert torch.equal(net.fc.weight, trained.fc.weight)
    assert net.pretrained_cfg["num_classes"] == 10
    assert net.pretrained_cfg["crop_pct"] == trained.pretrained_cfg["crop_pct"]
    assert net.pretrained_cfg["interpolation"] == trained.pretrained_cfg["interpolation"]
    assert trained.pretrained_cfg["num_classes"] == 1000  # timm's own table is as it was
    with pytest.raises(ValueError, match="does not fit the model: other shapes: fc"):
        load("timm/resnet18", weights=tmp_path / "w.safetensors", classes=7)
