"""The paper's equations, one pure function each.

Logits are (B, C) for classification or (B, C, ...) for dense prediction; one number per *sample* comes out, for dense
prediction the mean over its pixels. Half-precision logits are widened to float32 first, so that a threshold means the
same whatever the network computes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F


def _log_softmax(logits: Tensor) -> Tensor:
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.log_softmax(logits, dim=1)


def per_sample(values: Tensor) -> Tensor:
    """Mean over everything behind the first dimension."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax of each sample, in nats: E(x) of Eq. 2. Finite for any finite logits.

    Args:
        logits: (B, C) or (B, C, ...).

    Returns:
        (B,), between 0 and ln C.

    >>> entropy(torch.tensor([[0.0, 0.0], [10_000.0, -10_000.0]]))
    tensor([0.6931, -0.0000])
    """
    log_p = _log_softmax(logits)
    return per_sample(-(log_p.exp() * log_p).sum(1))


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy of the *mean* prediction over the copies of one image, in nats (MEMO, Zhang et al. 2021).

    Args:
        logits: (copies, C).

    >>> marginal_entropy(torch.tensor([[100.0, 0.0], [0.0, 100.0]]))
    tensor(0.6931)
    """
    log_p = mean_prediction(logits)
    return -(log_p.exp() * log_p).sum()


def mean_prediction(logits: Tensor) -> Tensor:
    """Logarithm of the mean softmax over the copies of one image, (C,); finite wherever the logits are.

    Args:
        logits: (copies, C).

    >>> mean_prediction(torch.tensor([[100.0, 0.0], [0.0, 100.0]])).exp()
    tensor([0.5000, 0.5000])
    """
    return _log_softmax(logits).logsumexp(0) - math.log(len(logits))


def probabilities(logits: Tensor) -> Tensor:
    """Softmax of each sample, (B, C): f(x) in Eq. 5; for dense prediction its mean over the pixels.

    >>> probabilities(torch.zeros(1, 4))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    p = _log_softmax(logits).exp()
    return p.flatten(2).mean(2) if p.dim() > 2 else p


def entropy_threshold(e0: float, classes: int) -> float:
    """E0 in nats from its fraction of the largest possible entropy, ln C (the paper: 0.4 ln C).

    >>> round(entropy_threshold(0.4, 1000), 4)
    2.7631
    """
    return e0 * math.log(classes)


def reliability(entropies: Tensor, threshold: float) -> Tensor:
    """The weight of reliable samples, Eq. 3: exp(E0 - E) where E < E0, else 0. No gradient flows through it.

    Args:
        entropies: (B,), in nats.
        threshold: E0, in nats.

    >>> reliability(torch.tensor([0.0, 1.0, 2.0]), threshold=1.0)
    tensor([2.7183, 0.0000, 0.0000])
    """
    entropies = entropies.detach()
    return torch.where(entropies < threshold, torch.exp(threshold - entropies), torch.zeros_like(entropies))


def diversity(predictions: Tensor, average: Tensor | None, epsilon: float) -> Tensor:
    """Which samples are not redundant, Eq. 5: \\|cos(f(x), m)\\| < epsilon. Without an average yet, all are.

    Args:
        predictions: softmax outputs, (B, C).
        average: moving average m of the predictions used so far, (C,), or None before the first.
        epsilon: threshold on the cosine.

    Returns:
        (B,) of booleans.

    >>> diversity(torch.eye(2), torch.tensor([1.0, 0.0]), epsilon=0.4)
    tensor([False,  True])
    """
    if average is None:
        return torch.ones(len(predictions), dtype=torch.bool, device=predictions.device)
    return F.cosine_similarity(predictions.detach(), average.to(predictions.dtype), dim=1).abs() < epsilon


def moving_average(average: Tensor | None, predictions: Tensor, alpha: float) -> Tensor | None:
    """The moving average m after a step, Eq. 4: alpha * mean + (1 - alpha) * m; at first the mean itself.

    Args:
        average: m so far, (C,), or None.
        predictions: softmax outputs of the samples used in this step, (n, C); none leaves m as it is.
        alpha: between 0 and 1; the paper's 0.1.

    >>> moving_average(torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0]]), alpha=0.1)
    tensor([0.9000, 0.1000])
    """
    if len(predictions) == 0:
        return average
    mean = predictions.detach().mean(0)
    return mean if average is None else alpha * mean + (1 - alpha) * average


def fisher_penalty(terms: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The anti-forgetting term R, Eq. 7: the sum of omega * (theta - theta_source)^2, without a factor 1/2.

    Args:
        terms: for each parameter the triple (theta, theta_source, omega), all of one shape.

    >>> fisher_penalty([(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.5]))])
    tensor(2.)
    """
    # one vector of all: a net has a hundred small parameters, and each operation on one costs more than its arithmetic
    theta, source, omega = (torch.cat([part.flatten() for part in parts]) for parts in zip(*terms, strict=True))
    return (omega * (theta - source).square()).sum()


def energy(logits: Tensor) -> Tensor:
    """Energy score of each sample (Liu et al. 2020), -logsumexp of the logits: low for in-distribution samples.

    >>> energy(torch.tensor([[5.0, 0.0], [0.0, 0.0]]))
    tensor([-5.0067, -0.6931])
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return per_sample(-torch.logsumexp(wide, dim=1))
