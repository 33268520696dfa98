"""BN adaptation (Schneider et al. 2020): statistics of the batch mixed with those of the source."""

from __future__ import annotations

from torch import nn

from eata import norm
from eata.adapter import Adapter
from eata.errors import EataError
from eata.inputs import in_range


class BN(Adapter):
    """BatchNorm statistics N/(N+n) * source + n/(N+n) * batch, with n the samples of the batch at hand. No gradient.

    Args:
        net: a model with BatchNorm layers that have running statistics.
        prior: N, how many samples the source statistics count for; the paper's 256 (with batches of 256). 0 uses the
            batch alone.

    >>> import torch
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> BN(net, prior=16)(torch.randn(4, 2)).shape
    torch.Size([4, 3])
    """

    prior: float

    def __init__(self, net: nn.Module, *, prior: float = 256) -> None:
        in_range("prior", prior, low=0.0)
        if not norm.has_batch_norm(net) or norm.lacks_running_statistics(net):
            raise EataError("eata.BN mixes the running statistics of BatchNorm layers, and this net has none.")
        super().__init__(net, statistics=norm.Statistics(prior))
        self.declare(prior=prior)
