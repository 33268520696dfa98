"""From the words of a command to the adapter that is served; replicas on other machines cook after the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import nn

import eata
from eata import arguments
from eata.adapter import Adapter
from eata.device import choose
from eata.norm import has_batch_norm


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is served.

    Args:
        model: a name for ``eata.models.load``.
        weights: file to take the weights from; None: those of the name.
        method: ``"source"``, ``"bn"``, ``"tent"``, ``"eta"`` or ``"eata"``.
        preset: ``"imagenet"``, ``"cifar10"`` or ``"digits"``; "": by the number of classes.
        lr: learning rate; None: the preset's.
        fisher: for EATA: folder of clean images.
        window: samples whose statistics stand in for a batch; 0: none.
        guard: whether to wrap the adapter in ``eata.Guard``.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"mps"``.

    >>> recipe = Recipe("resnet26-bn-digits", method="eta", preset="digits")
    >>> type(recipe.adapter(recipe.net())).__name__
    'Window'
    """

    model: str
    weights: Path | None = None
    method: str = "eata"
    preset: str = ""
    lr: float | None = None
    fisher: Path | None = None
    window: int = 64
    guard: bool = False
    device: str = "auto"

    def net(self) -> nn.Module:
        """The net, as it was trained, on its device."""
        return eata.models.load(self.model, weights=self.weights).to(choose(self.device))

    def adapter(self, net: nn.Module) -> Adapter:
        """The method around a net, in a window, and guarded if asked for."""
        given = arguments.of(
            net, self.method, preset=self.preset, lr=self.lr, fisher=self.fisher, on=choose(self.device)
        )
        model = self._windowed(eata.method(self.method)(net, **given))
        return eata.Guard(model) if self.guard else model

    def reader(self, net: nn.Module) -> Adapter:
        """For a replica: takes no steps, and has the statistics of its own traffic where the method uses them."""
        if self.method == "bn":
            return self._windowed(eata.BN(net, **eata.preset("imagenet", eata.BN)))
        if self.method == "source" or not has_batch_norm(net):
            return eata.Source(net)
        return self._windowed(eata.BN(net, prior=0))

    def _windowed(self, model: Adapter) -> Adapter:
        return eata.Window(model, length=self.window) if self.window else model
