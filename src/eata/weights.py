"""Other values for some parameters of a net: a teacher's, a source's, for a moment or for good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

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


@contextlib.contextmanager
def lent(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """The net works with these values for as long as the block lasts. Nothing is copied; all that is frozen is shared.

    >>> layer = nn.Linear(1, 1)
    >>> with lent(dict(layer.named_parameters()), {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}):
    ...     layer(torch.tensor([3.0])).detach()
    tensor([3.])
    """
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
