"""ETA and EATA (Niu et al. 2022), the paper's own methods."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eata import functional
from eata.errors import EataError
from eata.gradient import Choice, GradientAdapter, Shared
from eata.importance import Fisher, Per
from eata.inputs import in_range
from eata.passes import Pass

if TYPE_CHECKING:
    from eata.gradient import Unpack


class Filters(Shared, total=False):
    """ETA's arguments, and those of every gradient method."""

    e0: float
    epsilon: float
    alpha: float


class ETA(GradientAdapter):
    """Entropy minimization on reliable and non-redundant samples only (Section 'Sample Efficient ...').

    A sample takes part if its entropy is below E0 (Eq. 3) and its prediction unlike the moving average of those used
    before (Eq. 4, 5); its weight is exp(E0 - entropy). The loss is the mean over the samples that take part.

    Args:
        net: a model with normalization layers.
        e0: entropy threshold as a fraction of ln C, above 0 and at most 1; the paper's 0.4.
        epsilon: threshold on the cosine to the moving average, above 0 and at most 1; the paper's 0.05 (ImageNet), 0.4
            for CIFAR-10. 1 keeps all reliable samples.
        alpha: share of the new mean in the moving average, 0 to 1; the paper's 0.1.
        shared: ``lr`` (the paper's 0.005 for CIFAR-10) and the other arguments of ``eata.GradientAdapter``.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> model = ETA(net, e0=0.9, lr=0.1)
    >>> model(4 * torch.randn(4, 2)).shape, model.stats.backwards <= model.stats.forwards
    (torch.Size([4, 3]), True)
    """

    e0: float
    epsilon: float
    alpha: float
    #: moving average m of the predictions used so far, (C,); None before the first (Eq. 4)
    average: Tensor | None

    def __init__(
        self, net: nn.Module, *, e0: float = 0.4, epsilon: float = 0.05, alpha: float = 0.1, **shared: Unpack[Shared]
    ) -> None:
        in_range("e0", e0, low=0.0, high=1.0, open_low=True)
        in_range("epsilon", epsilon, low=0.0, high=1.0, open_low=True)
        in_range("alpha", alpha, low=0.0, high=1.0)
        super().__init__(net, **shared)
        self.declare(e0=e0, epsilon=epsilon, alpha=alpha)
        self.remember("average", None)

    def select(self, batch: Pass) -> Choice:
        """Samples that are reliable (Eq. 3) and not redundant (Eq. 5), weighted by their reliability."""
        threshold = functional.entropy_threshold(self.e0, batch.logits.shape[1])
        weight = functional.reliability(self.score(batch.logits), threshold)
        reliable = weight > 0
        predictions = functional.probabilities(batch.logits)
        return Choice.of(reliable & functional.diversity(predictions, self.average, self.epsilon), weight, reliable)

    def after_step(self, batch: Pass, choice: Choice) -> None:
        """The moving average takes in the samples used (Eq. 4)."""
        used = functional.probabilities(batch.logits[choice.index])
        self.average = functional.moving_average(self.average, used, self.alpha)


class EATA(ETA):
    """ETA with the anti-forgetting term: beta * sum of omega * (theta - theta_source)^2 joins the loss (Eq. 7, 8).

    Args:
        net: a model with normalization layers.
        fisher: importance omega of each parameter, from ``eata.fisher`` of this very net.
        beta: weight of the term, at least 0; the paper's 2000 (ImageNet, ``per="batch"``), 1 for CIFAR-10
            (``per="sample"``).
        per: the kind of Fisher that ``beta`` is meant for, as the presets say; another kind warns. None: any.
        filters: ``e0``, ``epsilon``, ``alpha`` and all other arguments of ``ETA``.

    >>> import eata
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> fisher = eata.fisher(net, torch.randn(8, 2))
    >>> model = EATA(net, fisher, e0=0.9, lr=0.1)
    >>> model(4 * torch.randn(4, 2)).shape
    torch.Size([4, 3])
    """

    beta: float
    per: Per | None
    importance: dict[str, Tensor]
    #: how the Fisher was made; None where it does not say
    fisher_per: Per | None

    def __init__(
        self,
        net: nn.Module,
        fisher: Mapping[str, Tensor],
        *,
        beta: float = 2000.0,
        per: Per | None = None,
        **filters: Unpack[Filters],
    ) -> None:
        in_range("beta", beta, low=0.0)
        importance = _matching(fisher, self.free_parameters(net, filters.get("layers")))
        made = getattr(fisher, "per", None)
        _warn_of_mismatch(made, beta, per)
        super().__init__(net, **filters)
        self.declare(beta=beta, per=per)
        self.remember("importance", importance)
        self.remember("fisher_per", made)

    @property
    def fisher(self) -> Fisher:
        """The importance in use, as ``eata.fisher`` gives it."""
        return Fisher(self.importance, self.fisher_per)

    def penalty(self) -> Tensor:
        """Beta times Eq. 7."""
        triples = ((theta, self.source[name], self.importance[name]) for name, theta in self.parameters.items())
        return self.beta * functional.fisher_penalty(triples)


def _warn_of_mismatch(made: Per | None, beta: float, per: Per | None) -> None:
    if made is not None and per is not None and made != per:
        warnings.warn(
            f"beta={beta:g} is meant for a Fisher with per={per!r}, and this one was made with per={made!r}, a "
            f"different scale; compute it with eata.fisher(net, images, per={per!r}).",
            UserWarning,
            stacklevel=3,
        )


def _matching(fisher: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The importance of each free parameter, on its device; raises for the Fisher of another model."""
    if not isinstance(fisher, Mapping):
        raise TypeError(f"fisher is a {type(fisher).__name__}; pass what eata.fisher(net, images) gave.")
    for name, parameter in parameters.items():
        if name not in fisher:
            raise EataError(
                f"The Fisher is of another model: it has no '{name}'; compute it with eata.fisher(net, images)."
            )
        if fisher[name].shape != parameter.shape:
            raise EataError(
                f"The Fisher is of another model: '{name}' has shape {tuple(fisher[name].shape)} there and "
                f"{tuple(parameter.shape)} here; compute it with eata.fisher(net, images)."
            )
    finite = torch.stack([torch.isfinite(fisher[name]).all().cpu() for name in parameters])
    if not bool(finite.all()):
        broken = list(parameters)[int(finite.int().argmin())]
        raise EataError(f"The Fisher of '{broken}' is not finite; compute it again on finite images.")
    return {name: fisher[name].detach().to(p.device, p.dtype).clone() for name, p in parameters.items()}
