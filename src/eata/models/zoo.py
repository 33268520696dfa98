"""``load``: from the name of a model to a network with its weights, and how its input is normalized."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from eata.errors import EataError, unknown
from eata.models import record

WEIGHTS = Path(__file__).parent / "weights"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SHOWN_KEYS = 3


def names() -> tuple[str, ...]:
    """The models whose trained weights come with the package.

    >>> "resnet26-bn-digits" in names()
    True
    """
    return tuple(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))


def load(name: str, *, weights: str | Path | None = None, classes: int | None = None) -> nn.Module:
    """A network in eval mode; ``net.pretrained_cfg`` says how to normalize its input, as in timm.

    Args:
        name: one of :func:`names`; the path of a file that ``eata train`` wrote; ``"timm/NAME"`` or
            ``"torchvision/NAME"``; or ``"package.module:factory"`` for your own. Your factory is called without
            arguments (with ``num_classes`` where ``classes`` is given) and should set ``net.pretrained_cfg``, a dict
            with ``mean``, ``std``, ``input_size`` and ``num_classes``: without it ImageNet's constants are assumed.
            ``crop_pct`` (default 0.875) and ``interpolation`` (``"bilinear"``) say how photographs are cut to size.
        weights: file to take the weights from: .safetensors, or .pth/.pt with nothing but tensors in it; default: those
            that belong to the name.
        classes: number of classes; a model that cannot be built with it is an error.

    >>> net = load("resnet26-bn-digits")
    >>> net.pretrained_cfg["num_classes"], net.pretrained_cfg["mean"]
    (10, (0.5, 0.5, 0.5))
    """
    if weights is not None and not Path(weights).is_file():
        raise FileNotFoundError(f"There is no file of weights {weights}.")
    maker, _, rest = name.partition("/")
    if name.endswith(".safetensors"):
        net = _own(Path(name))
    elif name in names():
        net = _own(WEIGHTS / f"{name}.safetensors")
    elif maker == "timm" and rest:
        net = _from_timm(rest, weights is None, classes)
    elif maker == "torchvision" and rest:
        net = _from_torchvision(rest, weights is None, classes)
    elif ":" in name:
        net = _from_factory(name, classes)
    else:
        raise unknown("model", name, names(), "Others: timm/NAME, torchvision/NAME, package.module:factory.")
    if weights is not None:
        fill(net, read_weights(Path(weights)), str(weights))
    found = _config(net).get("num_classes")
    if classes is not None and found is not None and found != classes:
        raise EataError(f"{name} has {found} classes, not {classes}.")
    return net.eval()


def _own(path: Path) -> nn.Module:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of weights {path}.")
    net = record.restore(path)
    made = record.read(path)
    _configure(net, made.mean, made.std, made.input_size, made.class_names)
    return net


def _configure(
    net: nn.Module,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    input_size: tuple[int, ...],
    class_names: tuple[str, ...],
) -> None:
    """Give a network timm's way of telling how its input is normalized."""
    net.pretrained_cfg = {  # type: ignore[assignment]
        "mean": mean,
        "std": std,
        "input_size": input_size,
        "num_classes": len(class_names),
        "label_names": class_names,
    }


def _config(net: Any) -> dict[str, Any]:
    config: dict[str, Any] = net.pretrained_cfg
    return config


def _import(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except Exception as problem:  # a torchvision built for another torch fails with RuntimeError and the like
        raise EataError(
            f"{package} cannot be imported ({problem}); `pip install 'eata[vision]'` brings one that fits your torch."
        ) from None


def _built(make: Callable[..., nn.Module], *arguments: Any, **options: Any) -> nn.Module:
    """Call another library's builder; what goes wrong in it (unknown name, no network) becomes one sentence."""
    try:
        return make(*arguments, **options)
    except Exception as problem:
        reason = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
        raise EataError(f"{arguments[0]} could not be built: {reason}. Without a network give weights=FILE.") from None


def _from_timm(name: str, pretrained: bool, classes: int | None) -> nn.Module:
    options = {} if classes is None else {"num_classes": classes}
    net = _built(_import("timm").create_model, name, pretrained=pretrained, **options)
    if classes is not None:  # timm's configuration is that of the published weights
        net.pretrained_cfg = {**_config(net), "num_classes": classes, "label_names": None}  # type: ignore[assignment]
    return net


def _from_torchvision(name: str, pretrained: bool, classes: int | None) -> nn.Module:
    models = _import("torchvision.models")
    options = {} if classes is None else {"num_classes": classes}
    net = _built(models.get_model, name, weights="DEFAULT" if pretrained else None, **options)
    published = models.get_model_weights(name).DEFAULT
    preparation = published.transforms()
    side = preparation.crop_size[0]
    _configure(
        net, tuple(preparation.mean), tuple(preparation.std), (3, side, side), tuple(published.meta["categories"])
    )
    _config(net).update(crop_pct=side / preparation.resize_size[0], interpolation=preparation.interpolation.value)
    if classes is not None and not pretrained:
        _config(net).update(num_classes=classes, label_names=None)
    return net


def _from_factory(name: str, classes: int | None) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # a user's own module lies where the command is run, as with `python -m`
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except Exception as problem:  # it is the user's own: a slip in it may be of any kind
        raise EataError(f"{name} cannot be imported: {problem}.") from problem
    finally:
        sys.path.remove(here)
    try:
        net = factory() if classes is None else factory(num_classes=classes)
    except TypeError as problem:
        raise EataError(f"{name} cannot be called as a factory of models: {problem}.") from problem
    except Exception as problem:
        raise EataError(f"{name} could not make a model: {type(problem).__name__}: {problem}.") from problem
    if not isinstance(net, nn.Module):
        raise EataError(f"{name} gives a {type(net).__name__}, not a torch.nn.Module.")
    if not hasattr(net, "pretrained_cfg"):
        warnings.warn(
            f"{name} does not say how its input is normalized, so ImageNet's mean and standard deviation are assumed; "
            "set net.pretrained_cfg = {'mean': ..., 'std': ..., 'input_size': ..., 'num_classes': ...} in it.",
            stacklevel=3,
        )
        config = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "input_size": (3, 224, 224)}
        linear = [module for module in net.modules() if isinstance(module, nn.Linear)]
        net.pretrained_cfg = {**config, "num_classes": linear[-1].out_features} if linear else config  # type: ignore[assignment]
    for key in ("mean", "std", "input_size", "num_classes"):
        if key not in _config(net):
            raise EataError(f"{name} does not say its {key}: set net.pretrained_cfg[{key!r}] where it is built.")
    return net


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of weights, whatever usual wrapping they are in; no code in it is run."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as problem:
        raise EataError(f"{path} is no whole safetensors file ({problem}).") from None
    except Exception as problem:  # torch.load tells damaged, foreign and unsafe files apart by many exceptions
        # only the first sentence: the next ones advise to run the code
        reason = str(problem).strip().partition("\n")[0].partition(". ")[0] or type(problem).__name__
        raise EataError(f"{path} is damaged or holds more than tensors, which could run code ({reason}).") from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise EataError(f"{path} holds no state dict: expected are names with tensors.")
    return {name.removeprefix("module."): value for name, value in content.items()}


def fill(net: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load ``state`` into ``net``; where they do not fit, name the first keys that differ and change nothing."""
    expected = net.state_dict()
    differences = {
        "it lacks": [name for name in expected if name not in state],
        "it has": [name for name in state if name not in expected],
        "other shapes:": [
            f"{name} {tuple(state[name].shape)} for {tuple(value.shape)}"
            for name, value in expected.items()
            if name in state and state[name].shape != value.shape
        ],
    }
    parts = [f"{what} {_first(keys)}" for what, keys in differences.items() if keys]
    if parts:
        raise EataError(f"{source} does not fit the model: {'; '.join(parts)}.")
    net.load_state_dict(state)


def _first(keys: list[str]) -> str:
    rest = len(keys) - SHOWN_KEYS
    return ", ".join(keys[:SHOWN_KEYS]) + (f" and {rest} more" if rest > 0 else "")
