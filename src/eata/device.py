"""Where the work is done: choosing a device, waiting for it, and its mixed precision."""

from __future__ import annotations

import contextlib

import torch

from eata.errors import EataError, unknown

NAMES = ("auto", "cpu", "cuda", "mps")


def choose(name: str = "auto") -> torch.device:
    """The device of this name, which is there; ``"auto"``: the accelerator if there is one, else the CPU.

    Args:
        name: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"mps"``.

    >>> choose("cpu")
    device(type='cpu')
    """
    kind, colon, number = name.partition(":")
    if kind not in NAMES or (colon and (kind != "cuda" or not number.isdigit())):
        raise unknown("device", name, NAMES, "A second GPU is cuda:1.")
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind == "auto":
        kind = next(one for one in ("cuda", "mps", "cpu") if there[one])
    if int(number or 0) >= there[kind]:
        have = f"there are {there[kind]}, counted from 0" if there[kind] else f"this torch sees no {kind} device"
        raise EataError(f"--device {name} can't be used: {have}. Take another, or auto.")
    return torch.device(f"{kind}:{number}" if number else kind)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def precision(device: torch.device, amp: bool) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products are taken in bfloat16, if ``amp``; else nothing changes.

    bfloat16 has the range of float32, so that gradients need no scaling.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16) if amp else contextlib.nullcontext()
