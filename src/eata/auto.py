"""``prior="auto"``: how much of the source's BatchNorm statistics is in use is chosen by the stream, without labels.

Now and then a few images are forwarded by each of three candidates, and the one that makes predictions sure, and not
all the same, is taken: the least of ``mean H(p) - weight * H(mean p)``. The entropy alone (weight 0) would take a
source that is sure of one wrong class; the mutual information (weight 1) is fooled by a stream of one class, where the
batch's own statistics spread the predictions over all classes.

What classes a batch is made of shows in the statistics of the deep layers, a shift of the images in those of the
early ones. So one candidate has the batch's share in the early layers (less and less, and none in the last): it helps
where images are shifted *and* come sorted by class. It also tells one stream from the other: the batch's share in the
deep layers makes predictions surer if the stream is shuffled, and doubtful if it is sorted. So these two are compared
first, and how much the spread of the predictions weighs against the source depends on which of them is left.

Only half and half learns. The two others have the source's statistics in the last layers, and its weights with them:
while one of these is the best no step is taken, and what was learnt before comes back with the next choice. All three
are looked at by the source's weights: learning makes predictions surer, also where it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eata import functional, norm
from eata.errors import EataError, unknown
from eata.mixture import Given
from eata.norm import Layer, Statistics

Prior = float | Literal["auto"]
#: the source's share in the first and in the last layer; in between it goes evenly from the one to the other
CANDIDATES = ((1.0, 1.0), (0.5, 0.5), (0.4, 1.0))
SOURCE, HALF, EARLY = range(3)
#: of the entropy of the mean prediction: half against early layers, source against half, source against early layers
WEIGHTS = (0.1, 0.7, 0.2)
SAMPLES = 64  # looked at until a choice is made
FULL = SAMPLES * len(CANDIDATES)  # forwards of a look
RATE = 0.1  # samples forwarded for looks, for each sample of the stream, at most on average
BLOCK = 32  # samples or more, whose mean entropy is compared with that of those before
MEMORY = 256  # samples that it is compared with; and so many are compared at most
JUMP = 3.0  # standard errors of that difference which say that something changed, while looks can be afforded


def choose(entropy: Sequence[float], spread: Sequence[float], weights: tuple[float, float, float] = WEIGHTS) -> int:
    """Which candidate fits the stream.

    Args:
        entropy: the mean entropy of the predictions by each, in nats.
        spread: the entropy of their mean.
        weights: of the spread; see ``WEIGHTS``.

    >>> choose([0.70, 0.70, 0.76], [1.79, 2.25, 2.11]) == HALF  # shuffled: the source is sure of a few classes
    True
    >>> choose([0.15, 1.04, 0.44], [0.26, 2.14, 0.81]) == SOURCE  # one class
    True
    """

    def better(a: int, b: int, weight: float) -> int:
        return a if entropy[a] - weight * spread[a] <= entropy[b] - weight * spread[b] else b

    between, shuffled, in_order = weights
    rival = better(HALF, EARLY, between)
    return better(SOURCE, rival, shuffled if rival == HALF else in_order)


class Layered(Statistics):
    """The source's share depends on the layer alone, whatever the size of the batch.

    Args:
        first: share in the first layer, above 0.
        last: share in the last.
        layers: how many there are.
    """

    def __init__(self, first: float, last: float, layers: int) -> None:
        super().__init__(math.inf if first == last == 1 else 1.0)
        self.first, self.last, self.layers = first, last, layers

    @property
    def rests(self) -> bool:
        """Whether the last layer has nothing of the batch.

        Steps would do harm then: with no batch to bring activations back to mean 0, all predictions drift to one class,
        of which they are sure, so that the looks would prefer it. And weights that were learnt by other statistics do
        not fit these.
        """
        return self.last == 1

    def share(self, samples: int) -> float:
        """The mean over the layers."""
        return (self.first + self.last) / 2

    def for_layer(self, layer: Layer, x: Tensor) -> Given:
        depth = layer.index / max(1, self.layers - 1)
        return Given(self.first + (self.last - self.first) * depth, layer.mean, layer.variance)


class Auto(Statistics):
    """One of the candidates, chosen by the stream; the source alone until the first choice.

    It looks at the first samples, again when the entropy of the predictions jumps, and else now and then. All looks
    together cost at most ``RATE`` forwards a sample, but for the first and two that may come early. The last of these
    needs a larger jump: where entropies jump all the time (another class, say) that tells little.

    Args:
        layers: how many BatchNorm layers the net has.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> statistics = Auto(layers=2)
    >>> statistics.share(64)
    1.0
    >>> sure = lambda rows, kind: 10 * (1.1 - kind.share(1)) * torch.eye(8)[rows % 8]
    >>> statistics.prepare(64, sure)  # the less of the source, the surer
    >>> statistics.share(64)
    0.5
    """

    def __init__(self, layers: int) -> None:
        super().__init__(math.nan)  # no number of samples; who needs one has to ask for share()
        self.candidates = [Layered(first, last, layers) for first, last in CANDIDATES]
        self.carried: dict[str, Any] = {
            "choice": 0,
            "missing": SAMPLES,  # samples of the look under way; 0: none is
            "credit": float(FULL),  # forwards that may be spent on looks; the first is for free
            "changed": False,
            "count": 0.0,  # samples in the sums of the looks so far; older looks count less
            "entropy": None,  # (candidates,)
            "predictions": None,  # (candidates, C)
            "usual": [0.0, 0.0, 0.0],  # entropies since the last change: count, mean, mean square
            "block": [0.0, 0.0, 0.0],  # the same of the latest ones
        }

    @property
    def current(self) -> Layered:
        """The candidate in use."""
        return self.candidates[int(self.carried["choice"])]

    @property
    def couples(self) -> bool:
        """Sooner or later."""
        return True

    @property
    def rests(self) -> bool:
        """The current one's."""
        return self.current.rests

    def share(self, samples: int) -> float:
        return self.current.share(samples)

    def for_layer(self, layer: Layer, x: Tensor) -> Given:
        return self.current.for_layer(layer, x)

    # --- looks ----------------------------------------------------------------------------------------------------

    def prepare(self, samples: int, forward: Callable[[Tensor, Statistics], Tensor]) -> None:
        """Look at some samples of the batch if it is time to, and choose once enough were seen."""
        carried = self.carried
        if not carried["missing"] and carried["credit"] >= (-FULL if carried["changed"] else FULL):
            carried["missing"] = SAMPLES
            if carried["changed"]:  # what was seen before is of no use now
                carried.update(count=0.0, entropy=None, predictions=None, changed=False)
        carried["credit"] = min(carried["credit"] + RATE * samples, FULL)
        if not carried["missing"] or carried["credit"] < -2 * FULL:  # a net that gives NaN would be looked at for ever
            return
        taken = min(samples, carried["missing"])
        rows = torch.arange(taken) * samples // taken  # spread over the batch
        logits = torch.stack([forward(rows, candidate) for candidate in self.candidates])
        carried["credit"] -= taken * len(self.candidates)
        if not bool(torch.isfinite(logits).all()):
            return
        self._add("entropy", torch.stack([functional.entropy(of_one).sum() for of_one in logits]))
        self._add("predictions", torch.stack([functional.probabilities(of_one).sum(0) for of_one in logits]))
        carried["count"] += taken
        carried["missing"] -= taken
        if not carried["missing"]:
            self._choose()

    def _add(self, name: str, value: Tensor) -> None:
        before = self.carried[name]
        self.carried[name] = value if before is None else before.to(value) + value

    def _choose(self) -> None:
        carried = self.carried
        mean = carried["predictions"] / carried["count"]
        spread = -(mean * mean.clamp_min(torch.finfo(mean.dtype).tiny).log()).sum(1)
        best = choose((carried["entropy"] / carried["count"]).tolist(), spread.tolist())
        for name in ("count", "entropy", "predictions"):  # the next look counts twice as much
            carried[name] = carried[name] / 2
        if best != carried["choice"]:
            carried.update(choice=best, usual=[0.0, 0.0, 0.0], block=[0.0, 0.0, 0.0])

    # --- changes --------------------------------------------------------------------------------------------------

    def notice(self, logits: Tensor) -> None:
        """Compare the entropy of the predictions given with what is usual."""
        entropy = functional.entropy(logits).double()
        total, squares = torch.stack([entropy.sum(), entropy.square().sum()]).tolist()
        if not math.isfinite(total):
            return
        carried = self.carried
        block = carried["block"] = _joined(
            carried["block"], [len(entropy), total / len(entropy), squares / len(entropy)]
        )
        if block[0] < BLOCK:
            return
        usual = carried["usual"]
        if usual[0]:
            both = _joined(usual, block)
            spread = max(both[2] - both[1] ** 2, 0.0) * (1 / usual[0] + 1 / block[0])
            needed = JUMP if carried["credit"] >= 0 else 2 * JUMP
            if abs(usual[1] - block[1]) > needed * math.sqrt(spread):
                carried.update(changed=True, usual=[0.0, 0.0, 0.0], block=[0.0, 0.0, 0.0])
                return
            if block[0] < MEMORY:  # a small change shows in more samples
                return
        carried["usual"] = _joined([min(usual[0], MEMORY), *usual[1:]], block)
        carried["block"] = [0.0, 0.0, 0.0]


def _joined(a: list[float], b: list[float]) -> list[float]:
    """Count, mean and mean square of two groups together."""
    count = a[0] + b[0]
    return [count, *[(a[0] * x + b[0] * y) / count for x, y in zip(a[1:], b[1:], strict=True)]]


def statistics_for(prior: Prior, net: nn.Module) -> Statistics:
    """What a method with this ``prior`` normalizes by; raises for one that can't be.

    >>> statistics_for(64, nn.BatchNorm1d(2)).share(64)
    0.5
    """
    if isinstance(prior, str):
        if prior != "auto":
            raise unknown("prior", prior, ["auto"], "Or give a number of samples.")
        if norm.lacks_running_statistics(net):
            raise EataError('prior="auto" needs running statistics, and a BatchNorm layer has none; use prior=0.')
        if norm.is_compiled(net):
            raise EataError(
                'prior="auto" needs to see the layers, which a compiled net hides; give eata the plain net.'
            )
        layers = len(norm.batch_norm_layers(net))
        return Auto(layers) if layers else Statistics(0)
    if not prior >= 0:
        raise EataError(
            f'prior={prior!r} is out of range: it has to be at least 0 (infinity: the source alone), or "auto".'
        )
    return Statistics(prior)
