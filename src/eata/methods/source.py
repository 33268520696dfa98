"""Source: the model as it was trained, the base of every comparison."""

from __future__ import annotations

import math

from torch import nn

from eata.adapter import Adapter
from eata.norm import Statistics


class Source(Adapter):
    """No adaptation: the net in eval mode with its own running statistics.

    Args:
        net: the model.

    >>> import torch
    >>> Source(nn.Sequential(nn.Linear(2, 3)))(torch.zeros(4, 2)).shape
    torch.Size([4, 3])
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, statistics=Statistics(math.inf))
