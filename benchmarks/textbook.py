"""Tent, EATA and two-pass EATA in stock PyTorch, written plainly: what a user would otherwise have.

The selection is pinned to the first ``chosen`` rows of each batch, so that the cost at a given B'/B can be measured.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def configure(net: nn.Module) -> list[nn.Parameter]:
    """Batch statistics on, everything frozen but BatchNorm's scale and shift."""
    net.eval().requires_grad_(False)
    parameters = []
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None
            module.track_running_stats = False
            parameters += [module.weight.requires_grad_(), module.bias.requires_grad_()]
    return parameters


def entropy(logits: Tensor) -> Tensor:
    """Of each row."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


class Forward:
    """Predict only, with batch statistics."""

    def __init__(self, net: nn.Module, chosen: int) -> None:
        self.net, self.parameters, self.chosen = net, configure(net), chosen
        self.optimizer = torch.optim.SGD(self.parameters, 1e-6, momentum=0.9)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.net(x)


class Tent(Forward):
    """Mean entropy of all rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """Logits, and one step."""
        logits = self.net(x)
        entropy(logits).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits.detach()


class EATA(Forward):
    """Entropy, redundancy, weights, moving average and Fisher term as published; then the pinned rows count."""

    def __init__(self, net: nn.Module, chosen: int) -> None:
        super().__init__(net, chosen)
        self.source = [p.detach().clone() for p in self.parameters]
        self.fisher = [torch.rand_like(p) for p in self.parameters]
        self.average: Tensor | None = None

    def select(self, logits: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        """Pinned rows and the weights of all."""
        threshold = 0.4 * math.log(logits.shape[1])
        probabilities = logits.softmax(1)
        if self.average is not None:
            similarity = F.cosine_similarity(self.average[None], probabilities, dim=1).abs()
            _ = ((entropies < threshold) & (similarity < 0.05)).nonzero()
        index = torch.arange(self.chosen)
        mean = probabilities[index].mean(0)
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        return index, torch.exp(threshold - entropies)

    def penalty(self) -> Tensor:
        """The Fisher term."""
        terms = zip(self.fisher, self.parameters, self.source, strict=True)
        return sum((f * (p - s).square()).sum() for f, p, s in terms)  # type: ignore[return-value]

    def __call__(self, x: Tensor) -> Tensor:
        """Logits, and one step."""
        logits = self.net(x)
        entropies = entropy(logits)
        index, weight = self.select(logits.detach(), entropies.detach())
        ((entropies[index] * weight[index]).mean() + self.penalty()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits.detach()


class TwoPass(EATA):
    """Forward without a graph, choose, and forward the chosen again with one: the authors' suggestion."""

    def __call__(self, x: Tensor) -> Tensor:
        """Logits, and one step."""
        with torch.no_grad():
            logits = self.net(x)
        index, weight = self.select(logits, entropy(logits))
        ((entropy(self.net(x[index])) * weight[index]).mean() + self.penalty()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits
