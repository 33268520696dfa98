"""A forgetting budget: weights are held where clean predictions have moved by at most so many nats from the source's.

To second order that distance is the drift ``K = 1/2 d' M d``, where d = theta - theta_source and M is the Fisher
information of the predictions. Of M the few directions are kept that matter most, and the diagonal of the rest. The
diagonal alone would not do: adaptation moves many weights together, and what each of them does by itself adds up to far
less than what they do in common. After each step the weights go back to the nearest point with ``K <= budget``. There
is nothing to tune, and nothing that could swing: the learning rate, the optimizer and the batch size decide how fast
the border is reached, and never how far beyond it a step ends.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 100  # Newton's method takes about five


class Curvature(NamedTuple):
    """M = rows' rows + diag(rest), for n parameters as one vector; nothing is ever as large as n x n.

    Attributes:
        rows: the directions that matter most, each as long as its weight asks, (r, n).
        rest: the diagonal of what they leave, at least 0, (n,).
    """

    rows: Tensor
    rest: Tensor

    def times(self, vector: Tensor) -> Tensor:
        """M v."""
        return self.rows.T @ (self.rows @ vector) + self.rest * vector

    def shrunk(self, vector: Tensor, mu: float) -> Tensor:
        """(1 + mu M)^-1 v, by the formula of Woodbury."""
        scaled = vector / (1 + mu * self.rest)
        rows = self.rows / (1 + mu * self.rest)
        inner = torch.eye(len(rows), dtype=rows.dtype, device=rows.device) + mu * rows @ self.rows.T
        common: Tensor = torch.linalg.solve(inner, self.rows @ scaled)
        return scaled - mu * rows.T @ common


def strongest(rows: Tensor, number: int) -> Tensor:
    """The ``number`` rows that keep the most of rows' rows: its eigenvectors, as long as the roots of their values.

    Args:
        rows: (m, n), m small.
        number: how many at most.

    >>> strongest(torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 1.0]]), 1).abs()
    tensor([[5., 0.]])
    """
    vectors: Tensor = torch.linalg.eigh(rows @ rows.T)[1]  # the weakest first
    return (vectors.T @ rows).flip(0)[:number]


def drift(curvature: Curvature, displacement: Tensor) -> float:
    """K in nats.

    Args:
        curvature: of the clean predictions.
        displacement: theta - theta_source, as one vector.

    >>> drift(Curvature(torch.zeros(0, 2), torch.tensor([0.5, 1.0])), torch.tensor([2.0, 0.0]))
    1.0
    """
    along = curvature.rows @ displacement
    return 0.5 * float(along @ along + curvature.rest @ displacement.square())


def held(curvature: Curvature, displacement: Tensor, budget: float) -> Tensor:
    """The displacement nearest to the given one, in the usual distance, whose drift is at most ``budget``.

    It is ``(1 + mu M)^-1 displacement``, where mu is the Lagrange multiplier of the constraint, the beta that this one
    step needs: what matters to the source is pulled back, and the rest hardly moves.

    Args:
        curvature: of the clean predictions.
        displacement: theta - theta_source, as one vector; finite.
        budget: in nats, above 0.

    >>> held(Curvature(torch.zeros(0, 2), torch.tensor([1.0, 0.0])), torch.tensor([2.0, 3.0]), budget=0.5)
    tensor([1., 3.])
    """
    if drift(curvature, displacement) <= budget:
        return displacement
    wide, moved = Curvature(*(part.double() for part in curvature)), displacement.double()
    mu = 0.0
    for _ in range(ROUNDS):
        # Newton on K^(-1/2), which is concave in mu (a power mean of the lines 1 + mu * eigenvalue) and nearly
        # straight: from the left of the root it goes up to it without ever passing it.
        shrunk = wide.shrunk(moved, mu)
        now = drift(wide, shrunk)
        if now <= budget * (1 + 1e-6):
            break
        felt = wide.times(shrunk)
        slope = float(felt @ wide.shrunk(felt, mu))
        if not slope > 0:
            break
        mu += 2 * now / slope * (math.sqrt(now / budget) - 1)
    shrunk = wide.shrunk(moved, mu)
    if not drift(wide, shrunk) <= 1.01 * budget:  # so far away that rounding is all there is: straight back
        shrunk = moved
    last = min(1.0, math.sqrt(budget / drift(wide, shrunk)))  # the millionth that may be left
    return (shrunk * last).to(displacement.dtype)
