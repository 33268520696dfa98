"""From the words of a command to the arguments of a method: what ``eata predict`` and ``eata serve`` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import eata
from eata import methods
from eata.errors import EataError
from eata.importance import BATCH

if TYPE_CHECKING:
    from eata.importance import Fisher, Per


def of(
    net: nn.Module,
    method: str,
    *,
    preset: str = "",
    lr: float | None = None,
    fisher: Path | None = None,
    kept: Fisher | None = None,
    on: torch.device | None = None,
) -> dict[str, Any]:
    """What the method is called with beside the net.

    Args:
        net: with ``pretrained_cfg``.
        method: its name.
        preset: its name; "": by the number of classes.
        lr: learning rate, for methods that have one; None: the preset's.
        fisher: for EATA: folder of clean images.
        kept: for EATA: a Fisher of before, in place of the folder.
        on: where the net is; None: on the CPU.

    >>> sorted(of(eata.models.load("resnet26-bn-digits"), "tent", preset="digits", lr=0.5).items())
    [('lr', 0.5)]
    """
    kind = eata.method(method)
    takes = methods.takes(kind)
    config: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    name = preset or methods.preset_for(int(config["num_classes"]))
    arguments: dict[str, Any] = dict(eata.preset(name, kind))
    if lr is not None and "lr" in takes:
        arguments["lr"] = lr
    if "fisher" in takes:
        arguments["fisher"] = kept or _fisher(net, fisher, config, arguments["per"], on or torch.device("cpu"))
    return arguments


def _fisher(net: nn.Module, folder: Path | None, config: dict[str, Any], per: Per, on: torch.device) -> Fisher:
    if folder is None:
        raise EataError(
            "EATA needs clean images, to know which weights to hold: pass a few hundred with --fisher FOLDER, or take "
            "--method eta, which needs none."
        )
    batches = eata.data.load(f"folder:{folder}", config=config).batches(BATCH, mean=config["mean"], std=config["std"])
    return eata.fisher(net, (x.to(on) for x, _ in batches), per=per)
