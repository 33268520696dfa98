"""Source training: the paper's recipe and a short one for a CPU, with a checkpoint after each epoch."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from eata import device
from eata.augmentation import crop_and_flip, rotate
from eata.errors import EataError
from eata.files import replacing
from eata.models.resnet26 import ResNet26
from eata.models.zoo import fill

CROP_PADDING = 4


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train: SGD with momentum 0.9 on random crops and flips.

    Args:
        epochs: passes over the training set.
        lr: peak learning rate.
        milestones: epochs at which the rate falls to a tenth; none means one cycle (linear up, then linear to 0).
        nesterov: Nesterov momentum.
        sizes: ``(first epoch, image side)`` pairs, ascending; the images are scaled down until the last pair's epoch.
        batch: images per step.
        weight_decay: L2 coefficient on all parameters.
        rotated: share of each batch that also trains the rotation head, if the net has one.
    """

    epochs: int
    lr: float
    milestones: tuple[int, ...] = ()
    nesterov: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    batch: int = 128
    weight_decay: float = 5e-4
    rotated: float = 1.0

    def rate(self, progress: float) -> float:
        """Learning rate after ``progress`` epochs (a fraction counts).

        >>> round(RECIPES["paper"].rate(60.5), 9), RECIPES["short"].rate(RECIPES["short"].epochs)
        (0.01, 0.0)
        """
        if self.milestones:
            return self.lr * float(f"1e-{sum(progress >= milestone for milestone in self.milestones)}")
        warm_up = 0.2 * self.epochs
        if progress < warm_up:
            return self.lr * progress / warm_up
        return self.lr * (self.epochs - progress) / (self.epochs - warm_up)

    def size(self, epoch: int, full: int) -> int:
        """Side of the training images in this epoch; ``full`` is the data's own."""
        side = full
        for first, value in self.sizes:
            if epoch >= first:
                side = min(value, full)
        return side


RECIPES = {
    "paper": Recipe(epochs=75, lr=0.1, milestones=(50, 65)),
    "paper-gn": Recipe(epochs=150, lr=0.1, milestones=(75, 125)),
    # Two thirds of the epochs on 24x24 images, which cost 0.57 of a 32x32 one: the net is convolutional up to its
    # pooling, so what it learns small carries over.
    "short": Recipe(epochs=28, lr=0.2, nesterov=True, sizes=((0, 24), (18, 32))),
    # The rotation head learns from half of each batch: classes are the harder task, and the time goes into more epochs.
    "short-joint": Recipe(epochs=50, lr=0.2, nesterov=True, sizes=((0, 24), (40, 32)), rotated=0.5),
    "digits": Recipe(epochs=30, lr=0.1, nesterov=True),
}


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What one epoch of training gave: its number (from 1), mean loss, test error in per cent, seconds."""

    number: int
    loss: float
    error: float
    seconds: float


def normalize(images: Tensor) -> Tensor:
    """uint8 images as the floats that ResNet-26 was trained on: mean 0.5, standard deviation 0.5."""
    return images.float().div_(127.5).sub_(1.0)


@torch.no_grad()
def error(net: nn.Module, images: Tensor, labels: Tensor, batch: int = 500) -> float:
    """Error in per cent of a net in eval mode on uint8 images."""
    was_training = net.training
    net.eval()
    on = next(net.parameters(), images).device
    wrong = 0
    for x, y in zip(images.split(batch), labels.split(batch), strict=True):
        wrong += int((net(normalize(x.to(on))).argmax(1).cpu() != y).sum())
    net.train(was_training)
    return 100.0 * wrong / len(labels)


def train(
    net: ResNet26,
    train_set: tuple[Tensor, Tensor],
    test_set: tuple[Tensor, Tensor],
    recipe: Recipe,
    checkpoint: Path,
    *,
    seed: int = 0,
    flip: bool = True,
    compiled: bool = False,
    amp: bool = False,
    resume: bool = False,
    report: Callable[[Epoch], None] = lambda epoch: None,
    tick: Callable[[int], None] = lambda images: None,
) -> list[Epoch]:
    """Train ``net`` in place; with a rotation head, jointly on classes and rotations (TTT).

    The same seed gives the same weights, and a run that was stopped and resumed gives those too: every epoch draws
    from a generator of its own. ``report`` hears of each epoch, ``tick`` of each step (in images).

    Args:
        net: network to train, on the device that does the work.
        train_set: uint8 images (N, 3, H, W) and labels (N).
        test_set: the same for the test error after each epoch. It is only reported; nothing is chosen by it.
        recipe: one of ``RECIPES`` or your own.
        checkpoint: file that holds the state after the last whole epoch.
        seed: of initial weights' caller, order and augmentation.
        flip: mirror images are still the same class (not so for digits).
        compiled: run the step through ``torch.compile`` (needs a C++ compiler; about 1.2 to 1.5 times as fast).
        amp: mixed precision.
        resume: go on from ``checkpoint`` if it exists.
        report: called after each epoch.
        tick: called after each step with its number of images.
    """
    images, labels = train_set
    on = next(net.parameters()).device
    optimizer = torch.optim.SGD(
        net.parameters(),
        recipe.lr,
        momentum=0.9,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    history: list[Epoch] = []
    fingerprint = {"recipe": dataclasses.asdict(recipe), "seed": seed, "images": len(images)}
    if amp:
        fingerprint["amp"] = True
    if resume and checkpoint.exists():
        history = _load(checkpoint, net, optimizer, fingerprint)
    loss_of = torch.compile(_loss, dynamic=False) if compiled else _loss

    for number in range(len(history), recipe.epochs):
        started = time.monotonic()
        generator = torch.Generator().manual_seed(seed * 100_003 + number)
        side = recipe.size(number, images.shape[-1])
        small = images if side == images.shape[-1] else _shrink(images, side)
        padding = CROP_PADDING * side // images.shape[-1]
        order = torch.randperm(len(images), generator=generator).split(recipe.batch)[: len(images) // recipe.batch]
        total = 0.0
        net.train()
        for step, index in enumerate(order):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(number + step / len(order))
            x = normalize(crop_and_flip(small[index], generator, padding, flip).to(on))
            x = x.contiguous(memory_format=torch.channels_last)
            turns = torch.randint(0, 4, (max(1, round(recipe.rotated * len(x))),), generator=generator).to(on)
            with device.precision(on, amp):
                loss = loss_of(net, x, labels[index].to(on), turns if net.rotation_head is not None else None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            tick(len(index))
        done = Epoch(number + 1, total / len(order), error(net, *test_set), time.monotonic() - started)
        history.append(done)
        _save(checkpoint, net, optimizer, history, fingerprint)
        report(done)
    net.eval()
    return history


def _loss(net: ResNet26, x: Tensor, labels: Tensor, turns: Tensor | None) -> Tensor:
    loss = F.cross_entropy(net(x), labels)
    if turns is not None:
        loss = loss + F.cross_entropy(net.rotation(rotate(x[: len(turns)], turns)), turns)
    return loss


def _shrink(images: Tensor, side: int) -> Tensor:
    parts = [
        F.interpolate(part.float(), size=(side, side), mode="bilinear", antialias=True).round_().clamp_(0, 255).byte()
        for part in images.split(1000)
    ]
    return torch.cat(parts)


def _save(
    path: Path, net: nn.Module, optimizer: torch.optim.SGD, history: list[Epoch], fingerprint: dict[str, Any]
) -> None:
    tensors = {f"net.{name}": value.contiguous() for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        tensors[f"momentum.{name}"] = optimizer.state[parameter]["momentum_buffer"].contiguous()
    epochs = [dataclasses.asdict(epoch) for epoch in history]
    metadata = {"fingerprint": json.dumps(fingerprint), "history": json.dumps(epochs)}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def _load(path: Path, net: nn.Module, optimizer: torch.optim.SGD, fingerprint: dict[str, Any]) -> list[Epoch]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except SafetensorError as problem:
        raise EataError(f"{path} is damaged ({problem}); remove it to start again.") from None
    if metadata.get("fingerprint") != json.dumps(fingerprint):
        raise EataError(f"{path} is no checkpoint of this recipe, seed and data set; move it away or name another.")
    fill(net, {name[4:]: value for name, value in tensors.items() if name.startswith("net.")}, str(path))
    for name, parameter in net.named_parameters():
        # in the parameter's own memory layout: the fused optimizer walks both side by side and trusts that they match
        optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"])
    return [Epoch(**epoch) for epoch in json.loads(metadata["history"])]
