"""Values of parameters beside their own: copies, and averages that follow."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of their own, by name."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def put(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Write these values into the parameters."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def follow(averages: Mapping[str, Tensor], parameters: Mapping[str, Tensor], share: float) -> None:
    """Move the averages, in place, by ``share`` of the way to the parameters: a teacher behind its student.

    >>> teacher = {"w": torch.zeros(1)}
    >>> follow(teacher, {"w": torch.ones(1)}, 0.25)
    >>> teacher
    {'w': tensor([0.2500])}
    """
    with torch.no_grad():
        for name, average in averages.items():
            average.lerp_(parameters[name].detach(), share)
