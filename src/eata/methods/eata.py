"""ETA and EATA (Niu et al. 2022), the paper's own methods."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eata import functional
from eata.adapter import Backward, Choice, MakeOptimizer, in_range
from eata.errors import EataError
from eata.importance import Per
from eata.methods.tent import Tent


class ETA(Tent):
    """Entropy minimization on reliable and non-redundant samples only (Section 'Sample Efficient ...').

    A sample takes part if its entropy is below E0 (Eq. 3) and its prediction unlike the moving average of those used
    before (Eq. 4, 5); its weight is exp(E0 - entropy). The loss is the mean over the samples that take part.

    Args:
        net: a model with normalization layers.
        e0: entropy threshold as a fraction of ln C, above 0 and at most 1; the paper's 0.4.
        epsilon: threshold on the cosine to the moving average, above 0 and at most 1; the paper's 0.05 (ImageNet), 0.4
            for CIFAR-10. 1 keeps all reliable samples.
        alpha: share of the new mean in the moving average, 0 to 1; the paper's 0.1.
        lr: learning rate; the paper's 0.00025 (ImageNet), 0.005 for CIFAR-10.
        optimizer: function from parameters to a torch optimizer; default SGD, momentum 0.9.
        backward: ``"rows"`` spends the backward pass on the chosen samples only; ``"full"`` is the textbook gradient.
        layers: adapt only the last ``layers`` normalization layers; None means all.
        lean: keep in memory only what training scale and shift needs (with ``backward="rows"``).

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> model = ETA(net, e0=0.9, lr=0.1)
    >>> model(4 * torch.randn(4, 2)).shape, model.stats.backwards <= model.stats.forwards
    (torch.Size([4, 3]), True)
    """

    def __init__(
        self,
        net: nn.Module,
        e0: float = 0.4,
        epsilon: float = 0.05,
        alpha: float = 0.1,
        lr: float = 0.00025,
        optimizer: MakeOptimizer | None = None,
        backward: Backward = "rows",
        layers: int | None = None,
        lean: bool = False,
    ) -> None:
        in_range("e0", e0, low=0.0, high=1.0, open_low=True)
        in_range("epsilon", epsilon, low=0.0, high=1.0, open_low=True)
        in_range("alpha", alpha, low=0.0, high=1.0)
        super().__init__(net, lr, False, optimizer, backward, layers, lean)
        self.settings.update(e0=e0, epsilon=epsilon, alpha=alpha)
        self.e0, self.epsilon, self.alpha = e0, epsilon, alpha
        #: moving average m of the predictions used so far, (C,); None before the first (Eq. 4)
        self.average: Tensor | None = None

    def select(self, logits: Tensor) -> Choice:
        """Samples that are reliable (Eq. 3) and not redundant (Eq. 5), weighted by their reliability."""
        threshold = functional.entropy_threshold(self.e0, logits.shape[1])
        weight = functional.reliability(functional.entropy(logits), threshold)
        reliable = weight > 0
        chosen = reliable & functional.diversity(functional.probabilities(logits), self.average, self.epsilon)
        index = chosen.nonzero().squeeze(1)
        return Choice(index, weight[index], int(reliable.sum()))

    def _chosen(self, logits: Tensor, choice: Choice) -> None:
        used = functional.probabilities(logits[choice.index])
        self.average = functional.moving_average(self.average, used, self.alpha)

    def reset(self) -> None:
        super().reset()
        self.average = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average}

    def _take_state(self, saved: dict[str, Any]) -> None:
        super()._take_state(saved)
        average: Tensor | None = saved["average"]
        self.average = None if average is None else average.to(next(iter(self.parameters.values())).device)


class EATA(ETA):
    """ETA with the anti-forgetting term: beta * sum of omega * (theta - theta_source)^2 joins the loss (Eq. 7, 8).

    Args:
        net: a model with normalization layers.
        fisher: importance omega of each parameter, from ``eata.fisher`` of this very net.
        beta: weight of the term, at least 0; the paper's 2000 (ImageNet, ``per="batch"``), 1 for CIFAR-10
            (``per="sample"``).
        per: the kind of Fisher that ``beta`` is meant for, as the presets say; another kind warns. None: any.
        e0: as in ``ETA``, and so are the arguments that follow.
        epsilon: as in ``ETA``.
        alpha: as in ``ETA``.
        lr: as in ``ETA``.
        optimizer: as in ``ETA``.
        backward: as in ``ETA``.
        layers: as in ``ETA``.
        lean: as in ``ETA``.

    >>> import eata
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> fisher = eata.fisher(net, torch.randn(8, 2))
    >>> model = EATA(net, fisher, e0=0.9, lr=0.1)
    >>> model(4 * torch.randn(4, 2)).shape
    torch.Size([4, 3])
    """

    def __init__(
        self,
        net: nn.Module,
        fisher: Mapping[str, Tensor],
        beta: float = 2000.0,
        per: Per | None = None,
        e0: float = 0.4,
        epsilon: float = 0.05,
        alpha: float = 0.1,
        lr: float = 0.00025,
        optimizer: MakeOptimizer | None = None,
        backward: Backward = "rows",
        layers: int | None = None,
        lean: bool = False,
    ) -> None:
        in_range("beta", beta, low=0.0)
        importance = _matching(fisher, self._free_parameters(net, layers))
        _warn_of_mismatch(fisher, beta, per)
        super().__init__(net, e0, epsilon, alpha, lr, optimizer, backward, layers, lean)
        self.settings.update(beta=beta, per=per)
        self.beta = beta
        self.importance = importance

    def penalty(self) -> Tensor:
        """Beta times Eq. 7."""
        triples = ((theta, self.source[name], self.importance[name]) for name, theta in self.parameters.items())
        return self.beta * functional.fisher_penalty(triples)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fisher": dict(self.importance)}

    def _take_state(self, saved: dict[str, Any]) -> None:
        importance = _matching(saved["fisher"], self.parameters)
        super()._take_state(saved)
        self.importance = importance


def _warn_of_mismatch(fisher: Mapping[str, Tensor], beta: float, per: Per | None) -> None:
    made = getattr(fisher, "per", None)
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
        if not bool(torch.isfinite(fisher[name]).all()):
            raise EataError(f"The Fisher of '{name}' is not finite; compute it again on finite images.")
    return {name: fisher[name].detach().to(p.device, p.dtype).clone() for name, p in parameters.items()}
