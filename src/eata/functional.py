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


def come_entropy(logits: Tensor) -> Tensor:
    """COME's entropy (Zhang et al., ICLR 2025, arXiv:2410.10894), a ``score`` for any method that minimizes entropy.

    The logits are evidence for C opinions beside the uncertain one: b = exp(z) / (sum exp(z) + C) and
    u = C / (sum exp(z) + C), and this is the entropy of the C + 1 numbers, each plus 1e-7. The length of the logits is
    taken as constant: the gradient has no part along them, so that a sample can't become sure by growing.

    Args:
        logits: (B, C) or (B, C, ...).

    Returns:
        (B,), in nats, 0 to ln(C + 1).

    >>> come_entropy(torch.tensor([[0.0, 0.0], [10_000.0, -10_000.0]])).round(decimals=4)
    tensor([1.0397, 0.0000])
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    tiny = torch.finfo(logits.dtype).tiny
    largest = logits.detach().abs().amax(1, keepdim=True).clamp(min=tiny)
    length = torch.linalg.vector_norm(logits / largest, dim=1, keepdim=True).clamp(min=tiny)
    of_fixed_length = logits * (length.detach() / length)
    uncertain = torch.full_like(largest, math.log(logits.shape[1]))
    p = F.softmax(torch.cat([of_fixed_length, uncertain], 1), dim=1) + 1e-7
    return per_sample(-(p * p.log()).sum(1))


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


def soft_likelihood_ratio(logits: Tensor) -> Tensor:
    """ROID's loss of each sample (Marsden et al. 2024): -sum p log(p / (1 - p) + 1e-5), with p at most 0.99.

    Unlike the entropy, its gradient does not vanish where the model is sure.

    >>> soft_likelihood_ratio(torch.tensor([[0.0, 1.0], [0.0, 100.0]]))
    tensor([-0.4621, -4.5492])
    """
    p = _log_softmax(logits).exp().clamp(max=0.99)
    return per_sample(-(p * torch.log(p / (1 - p) + 1e-5)).sum(1))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each sample to the softmax of the logits ``target``, as a student's to its teacher.

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([[5.0, -5.0]]))
    tensor([0.6931])
    """
    return per_sample(-(_log_softmax(target).exp() * _log_softmax(logits)).sum(1))


def smoothed_prior(predictions: Tensor) -> Tensor:
    """How often each class was predicted in a batch, smoothed, (C,): ROID's correction of the logits.

    Args:
        predictions: softmax outputs, (B, C).

    >>> smoothed_prior(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([0.5000, 0.5000])
    """
    samples, classes = predictions.shape
    prior = predictions.mean(0)
    smooth = max(1 / samples, 1 / classes) / prior.max()
    return (prior + smooth) / (1 + smooth * classes)


def scaled(values: Tensor) -> Tensor:
    """Values from 0 (the least) to 1 (the largest); 0 where all are alike.

    >>> scaled(torch.tensor([1.0, 2.0, 5.0])), scaled(torch.tensor([3.0]))
    (tensor([0.0000, 0.2500, 1.0000]), tensor([0.]))
    """
    low, high = torch.aminmax(values)
    return (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)


def neighbourhood(features: Tensor, neighbours: int) -> Tensor:
    """W (B, B): 1 for the nearest neighbours of each row of (B, D), itself left out.

    >>> neighbourhood(torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0]]), 1)
    tensor([[0., 1., 0.],
            [1., 0., 0.],
            [0., 1., 0.]])
    """
    near = F.normalize(features, dim=1)
    cosines = (near @ near.T).fill_diagonal_(-math.inf)
    nearest = cosines.topk(min(neighbours, len(features) - 1), dim=1).indices
    return torch.zeros_like(cosines).scatter_(1, nearest, 1.0)


def closeness(features: Tensor, neighbours: int) -> Tensor:
    """W (B, B): exp(-d^2 / 2 s^2) of the distances of the rows of (B, D) after they were brought to length 1.

    >>> closeness(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 2)
    tensor([[1.0000, 0.6065],
            [0.6065, 1.0000]])
    """
    near = F.normalize(features, dim=1)
    distances = torch.cdist(near, near, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(0)
    last = distances.topk(min(neighbours, len(features)), dim=1, largest=False).values[:, -1]
    scale = last.mean().clamp(min=torch.finfo(last.dtype).eps)
    return torch.exp(-distances.square() / (2 * scale.square()))
