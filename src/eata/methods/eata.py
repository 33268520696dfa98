"""ETA and EATA (Niu et al. 2022), the paper's own methods."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eata import budget as budgets
from eata import functional
from eata.errors import EataError
from eata.gradient import Choice, GradientAdapter, Shared
from eata.importance import Fisher, Per
from eata.inputs import in_range
from eata.passes import Pass

if TYPE_CHECKING:
    from eata.gradient import Unpack


BETA = 2000.0  # the paper's for ImageNet


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

    divisible = True
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

    def update(self, batch: Pass, choice: Choice) -> bool:
        """One step; what the moving average will need of other processes is asked for before it."""
        batch.notes["used"] = batch.total(functional.probabilities(batch.logits[choice.index]).sum(0))
        return super().update(batch, choice)

    def after_step(self, batch: Pass, choice: Choice) -> None:
        """The moving average takes in the samples used (Eq. 4)."""
        used = batch.notes["used"] / choice.count
        self.average = functional.moving_average(self.average, used[None], self.alpha)


class EATA(ETA):
    """ETA with the anti-forgetting term: beta * sum of omega * (theta - theta_source)^2 joins the loss (Eq. 7, 8).

    Or, in place of the term, a budget: how far, in nats, the predictions on clean data may move from the source's.
    After each step the weights go back to the nearest point within it (``eata.budget``). A budget means the same for
    every net, learning rate and data set, where beta does not; and it holds at every step of a stream of any length.

    Args:
        net: a model with normalization layers.
        fisher: importance omega of each parameter, from ``eata.fisher`` of this very net.
        beta: weight of the term, at least 0; the paper's 2000 (ImageNet, ``per="batch"``; the default where there is no
            budget), 1 for CIFAR-10 (``per="sample"``).
        per: the kind of Fisher that ``beta`` is meant for, as the presets say; another kind warns. None: any.
        budget: in nats, above 0, in place of beta; 0.02 is a good one. It needs what ``eata.fisher`` gives with
            ``per="sample"``. With a preset: ``eata.preset("cifar10") | {"beta": None, "budget": 0.02}``.
        filters: ``e0``, ``epsilon``, ``alpha`` and all other arguments of ``ETA``.

    >>> import eata
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> fisher = eata.fisher(net, torch.randn(8, 2))
    >>> model = EATA(net, fisher, budget=0.02, e0=0.9, lr=10.0)
    >>> model(4 * torch.randn(4, 2)).shape
    torch.Size([4, 3])
    >>> 0 < model.drift < 0.0201
    True
    """

    beta: float | None
    budget: float | None
    per: Per | None
    importance: dict[str, Tensor]
    #: what a budget and the drift need of the Fisher; None where it has none
    curvature: dict[str, Tensor] | None
    #: how the Fisher was made; None where it does not say
    fisher_per: Per | None

    def __init__(
        self,
        net: nn.Module,
        fisher: Mapping[str, Tensor],
        *,
        beta: float | None = None,
        per: Per | None = None,
        budget: float | None = None,
        **filters: Unpack[Filters],
    ) -> None:
        free = self.free_parameters(net, filters.get("layers"))
        importance = _matching(fisher, free)
        made = getattr(fisher, "per", None)
        felt = getattr(fisher, "curvature", None)
        if budget is not None:
            _require_budget(budget, beta, made, felt)
        else:
            beta = BETA if beta is None else beta
            in_range("beta", beta, low=0.0)
            _warn_of_mismatch(made, beta, per)
        super().__init__(net, **filters)
        self.declare(beta=beta, per=per, budget=budget)
        self.remember("importance", importance)
        self.curvature = None if felt is None else _fitting(felt, free)
        if budget is not None:  # else it only tells the drift, and a state can do without
            self.remember("curvature", self.curvature)
        self.remember("fisher_per", made)

    @property
    def fisher(self) -> Fisher:
        """The importance in use, as ``eata.fisher`` gives it."""
        return Fisher(self.importance, self.fisher_per, self.curvature)

    @property
    def drift(self) -> float | None:
        """How far the predictions on clean data have moved from the source's, in nats (``eata.budget``).

        None where the Fisher has no curvature: one that was made per batch says nothing in nats.
        """
        if self.curvature is None:
            return None
        with self.lock:
            return budgets.drift(*self._curvature_and_displacement())

    def penalty(self) -> Tensor | None:
        """Beta times Eq. 7; nothing where a budget takes its place."""
        if self.beta is None:
            return None
        triples = ((theta, self.source[name], self.importance[name]) for name, theta in self.parameters.items())
        return self.beta * functional.fisher_penalty(triples)

    def update(self, batch: Pass, choice: Choice) -> bool:
        """One gradient, one step, and back into the budget."""
        stepped = super().update(batch, choice)
        if stepped and self.budget is not None:
            self._hold(self.budget)
        return stepped

    def _hold(self, budget: float) -> None:
        curvature, displacement = self._curvature_and_displacement()
        now = budgets.drift(curvature, displacement)
        if now <= budget:
            return
        if not math.isfinite(now):
            self.warn_once("A step led to weights that are not finite, so they are the source's again; lower lr.")
            self.restore_source()
            return
        back = budgets.held(curvature, displacement, budget).split([p.numel() for p in self.parameters.values()])
        with torch.no_grad():
            for (name, theta), moved in zip(self.parameters.items(), back, strict=True):
                theta.copy_((self.source[name].cpu() + moved.view_as(theta)).to(theta.dtype))

    def _curvature_and_displacement(self) -> tuple[budgets.Curvature, Tensor]:
        """On the host and in double precision: one look at the device for all."""
        assert self.curvature is not None
        felt = torch.cat([self.curvature[name].flatten(1).cpu() for name in self.parameters], dim=1).double()
        moved = [(theta.detach() - self.source[name]).flatten().cpu() for name, theta in self.parameters.items()]
        return budgets.Curvature(felt[:-1], felt[-1].square()), torch.cat(moved).double()


def _require_budget(
    budget: float, beta: float | None, made: Per | None, curvature: Mapping[str, Tensor] | None
) -> None:
    in_range("budget", budget, low=0.0, open_low=True)
    if beta is not None:
        raise EataError(
            f"budget={budget:g} takes the place of beta={beta:g}; give one of them. With a preset: "
            'eata.preset("cifar10") | {"beta": None, "budget": 0.02}.'
        )
    if made != "sample":
        raise EataError(
            f"A budget is in nats, which needs a Fisher with per='sample', and this one has per={made!r}; compute it "
            "with eata.fisher(net, images, per='sample')."
        )
    if curvature is None:
        raise EataError("A budget needs the curvature that eata.fisher(net, images) gives; this Fisher has none.")


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
    return _alike(fisher, parameters)


def _fitting(curvature: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The curvature of each free parameter, on its device."""
    for name, parameter in parameters.items():
        rows = curvature.get(name)
        if rows is None or rows.shape[1:] != parameter.shape or not bool(torch.isfinite(rows).all()):
            raise EataError(
                f"The Fisher's curvature of '{name}' is missing, of another shape or not finite; compute it again: "
                "eata.fisher(net, images)."
            )
    return _alike(curvature, parameters)


def _alike(values: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """A copy of the values of each parameter, on its device and in its type."""
    return {name: values[name].detach().to(p.device, p.dtype).clone() for name, p in parameters.items()}
