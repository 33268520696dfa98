"""A forgetting budget: weights are held where clean predictions have moved by at most so many nats from the source's.

To second order, and with omega of each sample (Eq. 9 as written), that distance is the drift
``K = 1/2 sum of omega * (theta - theta_source)^2``. After each step the weights go back to the nearest point with
``K <= budget``. There is nothing to tune, and nothing that could swing: the learning rate, the optimizer and the batch
size decide how fast the border is reached, and never how far beyond it a step ends.
"""

from __future__ import annotations

import math

from torch import Tensor

ROUNDS = 100  # Newton's method takes about five


def drift(omega: Tensor, displacement: Tensor) -> float:
    """K in nats.

    Args:
        omega: importance of each parameter, as one vector.
        displacement: theta - theta_source, likewise.

    >>> import torch
    >>> drift(torch.tensor([0.5, 1.0]), torch.tensor([2.0, 0.0]))
    1.0
    """
    return 0.5 * float((omega * displacement.square()).sum())


def held(omega: Tensor, displacement: Tensor, budget: float) -> Tensor:
    """The displacement nearest to the given one, in the usual distance, whose drift is at most ``budget``.

    It is ``displacement / (1 + mu * omega)``, where mu is the Lagrange multiplier of the constraint, the beta that this
    one step needs: what matters to the source is pulled back, and the rest hardly moves.

    Args:
        omega: importance of each parameter, as one vector, at least 0.
        displacement: theta - theta_source, likewise; finite.
        budget: in nats, above 0.

    >>> import torch
    >>> held(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 3.0]), budget=0.5)
    tensor([1., 3.])
    """
    if drift(omega, displacement) <= budget:
        return displacement
    wide, moved = omega.double(), displacement.double()
    mu = 0.0
    for _ in range(ROUNDS):
        # Newton on K^(-1/2), which is concave in mu (a power mean of the lines 1 + mu * omega) and nearly straight:
        # from the left of the root it goes up to it without ever passing it.
        shrunk = moved / (1 + mu * wide)
        now = drift(wide, shrunk)
        if now <= budget * (1 + 1e-6):
            break
        slope = float((wide.square() * shrunk.square() / (1 + mu * wide)).sum())
        mu += 2 * now / slope * (math.sqrt(now / budget) - 1)
    shrunk = moved / (1 + mu * wide)
    last = min(1.0, math.sqrt(budget / drift(wide, shrunk)))  # the millionth that may be left, whatever happened above
    return (shrunk * last).to(displacement.dtype)
