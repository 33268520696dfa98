"""Guard: adaptation that is safe to leave on. It watches, compares with the source, undoes, and comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eata import functional, norm
from eata.adapter import Adapter
from eata.errors import EataError
from eata.inputs import Inputs, finite_rows
from eata.norm import Statistics
from eata.wrapper import Wrapper

# Chosen on corrupted training images: benchmarks.tune_guard, results/guard-tuning.
CLEAR = 1.5  # standard errors from 0: a cost of which the sign is clear
SMALL = 0.005  # of accuracy: a cost that is clearly below it is none
ALARM = 0.05  # of accuracy: a clear cost above it is an alarm
CLASSES = 0.8  # of the source's: predicting fewer is an alarm

BLOCK = 64  # samples that a judgement needs at least
BLOCKS = 2  # of which a judgement is made at most, the latest
LONGEST = 16  # blocks between two comparisons, once trust has grown
SURPRISE = 4.0  # deviations from its usual entropy at which the model is compared at once
LITTLE = 0.04  # of the largest entropy: never a surprise
RATE = 0.1  # by which 'usual' follows
PATIENCE = 32  # good judgements in a row to come back, at most
KEPT = 3  # snapshots
EVENTS = 1000  # of the latest, kept

Kind = Literal["waiting", "adapting", "alarm", "reset"]
log = logging.getLogger("eata.guard")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The adapted model beside the source on the same samples.

    Attributes:
        agreement: share of the samples on which both predict the same class.
        cost: accuracy that is lost by not asking the source, estimated: where they disagree, by how much the source is
            surer, averaged over all samples; below 0 where adaptation helps.
        doubt: standard error of the cost.
        classes: effective number of classes that the adapted model predicts, exp of the entropy of their shares.
        source_classes: the same of the source.
    """

    agreement: float
    cost: float
    doubt: float
    classes: float
    source_classes: float

    @classmethod
    def of(cls, adapted: Tensor, source: Tensor) -> Comparison:
        """From the probabilities (n, C) of both; two samples at least."""
        sure, label = adapted.max(1)
        source_sure, source_label = source.max(1)
        differ = (label != source_label).to(sure.dtype)
        costs = differ * (source_sure - sure)
        doubt = costs.std() / math.sqrt(len(costs))
        values = [1 - differ.mean(), costs.mean(), doubt, *(_classes(p) for p in (adapted, source))]
        return cls(*torch.stack(values).tolist())

    @property
    def is_varied(self) -> bool:
        """Whether the adapted model predicts about as many classes as the source; one that has collapsed does not."""
        return self.classes >= CLASSES * self.source_classes

    @property
    def is_good(self) -> bool:
        """Whether adaptation clearly costs nothing, or next to nothing."""
        return self.is_varied and self.cost + CLEAR * self.doubt <= SMALL

    @property
    def is_bad(self) -> bool:
        """Whether it clearly costs something; what is not a number is no good either."""
        return not self.is_varied or self.cost - CLEAR * self.doubt > 0

    @property
    def is_alarming(self) -> bool:
        """Whether it is clearly bad by much: a block of 64 alone can show a cost of seven points that is not there."""
        return not self.is_varied or self.cost - CLEAR * self.doubt > ALARM

    def __str__(self) -> str:
        return (
            f"adapted model and source agree on {self.agreement:.0%}, estimated cost {self.cost:+.1%} of accuracy, "
            f"give or take {self.doubt:.1%}, {self.classes:.1f} classes predicted where the source predicts "
            f"{self.source_classes:.1f}"
        )


@dataclasses.dataclass(frozen=True)
class Event:
    """A decision of the guard.

    Attributes:
        batch: when: the number of the batch, from 1.
        kind: ``"adapting"``: the adapted model answers from now on; ``"waiting"``: the source does, which is a little
            better; ``"alarm"``: the source does, and learning was undone; ``"reset"``: it still does, for the state
            that was gone back to is no better.
        seen: what was seen.
        done: what was done, in words.
    """

    batch: int
    kind: Kind
    seen: Comparison
    done: str

    def __str__(self) -> str:
        return f"batch {self.batch}: {self.done} ({self.seen})"


class Guard(Wrapper):
    """Any adapter, safe to leave on.

    1. At the start each batch is given to both, the adapted model and the source (its weights and statistics). Where
       they disagree, the surer one is believed, and answers. This estimates what adaptation costs, in points of
       accuracy, with a standard error, from the latest 64 to 128 samples.
    2. Once the cost is clearly below 0, or nothing, the adapted model answers alone. From then on both are compared
       after 1, 2, 4, 8 and every 16 blocks of 64, and at once when the model's mean entropy is not what it was.
    3. Once the cost is clearly above 0, the source answers, already for the batch at hand, and nothing is learnt.
       In doubt, the surer one of both goes on answering, and the model learns.
    4. A clear cost of several points, or clearly fewer classes than the source predicts, is an alarm: the weights go
       back to those of the last good comparison; if these do no better, to the source's.
    5. It comes back when the cost is clearly below 0; after an alarm twice in a row, and twice as often after each
       further alarm; half as often again while nothing happens.
    6. Each decision is an `Event`: in ``guard.events``, given to ``on_event``, and a line of the logger ``eata.guard``.

    Args:
        model: an adapter, such as ``eata.EATA(net, fisher, budget=0.02)`` or a ``eata.Window`` around one.
        on_event: called with each `Event`.

    >>> import eata
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> model = Guard(eata.Tent(net, lr=0.1), on_event=lambda event: print(event.batch, event.kind))
    >>> model(torch.randn(256, 2)).shape
    1 adapting
    torch.Size([256, 3])
    """

    #: batches so far
    batches: int
    #: whether the source answers
    resting: bool
    #: whether both are asked, and the surer one answers; the latest probabilities (n, C) of model and source
    comparing: bool
    evidence: list[Tensor] | None
    #: blocks since the last comparison, and until the next
    since: int
    interval: int
    #: good judgements in a row, and how many are needed to come back
    good: int
    need: int
    #: the block under way: sum of entropies and samples; its usual mean and variance
    block: list[float]
    usual: list[float] | None
    #: states of the method at good comparisons, the latest last
    kept: list[dict[str, Any]]
    record: list[dict[str, Any]]

    def __init__(self, model: Adapter, *, on_event: Callable[[Event], None] | None = None) -> None:
        if not isinstance(model, Adapter):
            raise TypeError(f"eata.Guard wraps an adapter, not a {type(model).__name__}: eata.Guard(eata.Tent(net)).")
        method = model
        while isinstance(method, Wrapper):
            if isinstance(method, Guard):
                raise EataError("This model has a guard already; one is enough.")
            method = method.model
        if norm.lacks_running_statistics(model.net):
            raise EataError(
                "A BatchNorm layer of this net has no running statistics, so there is no source to compare with or to "
                "fall back to; train it with track_running_stats=True."
            )
        super().__init__(model)
        #: the adapter inside of all wrappers
        self.method = method
        self.divisible = model.divisible
        #: the rows of a tensor, samples first, for the samples of all processes (`eata.parallel`); here: this one's
        self.joined: Callable[[Tensor], Tensor] = _as_they_are
        self.on_event = on_event
        self._own = dict(self.net.named_parameters())
        flags = {"resting": False, "comparing": True}
        counts = {"batches": 0, "since": 0, "interval": 1, "good": 0, "need": 1}
        watched = {"evidence": None, "block": [0.0, 0], "usual": None, "kept": [], "record": []}
        for name, value in {**flags, **counts, **watched}.items():
            self.remember(name, value)

    @property
    def events(self) -> list[Event]:
        """The decisions so far, the latest last."""
        return [Event(**{**row, "seen": Comparison(**row["seen"])}) for row in self.record]

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self, inputs: Inputs) -> Tensor:
        if not self.learning:
            return self._predicted(inputs)
        self.batches += 1
        with self._paused():
            adapted = self.model.run(inputs)
        if not self.resting and not self.comparing:
            self.comparing = self._is_due(adapted)
            if not self.comparing:
                return adapted
        source = self._of_source(inputs)
        self._compare(adapted, source)
        return source if self.resting else _surer(adapted, source) if self.comparing else adapted

    def _predicted(self, inputs: Inputs) -> Tensor:
        """The answer as it is now; nothing is learnt, compared or decided."""
        if self.resting:
            return self._of_source(inputs, count=True)
        adapted = self.model.run(inputs)
        return _surer(adapted, self._of_source(inputs)) if self.comparing else adapted

    def _is_due(self, logits: Tensor) -> bool:
        """Whether it is time for a comparison; watches the model's own entropy, which costs nothing."""
        entropies = self.joined(functional.entropy(logits))
        self.block = [self.block[0] + float(entropies.sum()), self.block[1] + len(entropies)]
        if self.block[1] < BLOCK:
            return False
        mean, self.block = self.block[0] / self.block[1], [0.0, 0]
        self.since += 1
        usual = self._is_usual(mean / math.log(logits.shape[1]))
        return self.since >= self.interval or not usual

    def _is_usual(self, mean: float) -> bool:
        """Whether a block's mean entropy, as a share of the largest, is what it was lately; 'lately' takes it in."""
        if self.usual is None:
            self.usual = [mean, 0.0]
        level, variance = self.usual
        far = mean - level
        usual = abs(far) <= max(SURPRISE * math.sqrt(variance), LITTLE)
        if usual:
            self.usual = [level + RATE * far, (1 - RATE) * (variance + RATE * far * far)]
        else:  # a new level; how much is usual there remains to be seen
            self.usual = [mean, variance] if math.isfinite(mean) else None
        return usual

    def _compare(self, adapted: Tensor, source: Tensor) -> None:
        """Take in what both say of a batch, and judge, once enough was seen."""
        both = [self.joined(functional.probabilities(logits)) for logits in (adapted, source)]
        answered = finite_rows([both[1]])  # rows that the source has no answer for do not count
        if answered is not None:
            both = [p[answered] for p in both]
        if self.evidence is not None:
            both = [torch.cat(pair)[-BLOCKS * BLOCK :] for pair in zip(self.evidence, both, strict=True)]
        self.evidence = both
        if len(both[0]) < BLOCK:
            return
        seen = Comparison.of(*both)
        if seen.is_good or seen.is_bad:
            self.evidence, self.comparing, self.since = None, False, 0
            (self._distrust if seen.is_bad else self._trust)(seen)

    def _trust(self, seen: Comparison) -> None:
        self.good += 1
        if self.resting and self.good < self.need:
            return
        if self.resting or not self.record:
            self.resting, self.interval, self.usual = False, 1, None
            self._tell("adapting", seen, "the adapted model answers and learns")
        elif self.interval < LONGEST:
            self.interval *= 2
        else:
            self.need = max(1, self.need // 2)
        self.kept = [*self.kept, self._state()][-KEPT:]

    def _distrust(self, seen: Comparison) -> None:
        self.good = 0
        was_resting, self.resting = self.resting, True
        if not seen.is_alarming:
            if not was_resting:
                self._tell("waiting", seen, "the source answers, which is a little better")
            return
        alarmed = was_resting and self.record[-1]["kind"] in ("alarm", "reset")
        if alarmed and not self.kept:  # all that can be done was done
            return
        if alarmed:
            self.kept = []
        else:
            self.need = min(2 * self.need, PATIENCE)
        where = "those of the last good comparison" if self.kept else "the source's"
        self._undo_learning()
        self._tell("reset" if alarmed else "alarm", seen, f"the source answers, and the weights are {where}")

    def _tell(self, kind: Kind, seen: Comparison, done: str) -> None:
        event = Event(self.batches, kind, seen, done)
        self.record = [*self.record, dataclasses.asdict(event)][-EVENTS:]
        log.log(logging.INFO if kind in ("waiting", "adapting") else logging.WARNING, "%s", event)
        if self.on_event is not None:
            self.on_event(event)

    # --- the source -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _as_source(self) -> Iterator[None]:
        """The net has the source's weights and normalizes by its statistics, for as long as the block lasts."""
        adapted, statistics = {}, self.method.statistics
        try:
            for name, value in self.method.source_values().items():
                adapted[name] = self._own[name].data
                self._own[name].data = value
            self.method.statistics = Statistics(math.inf)
            yield
        finally:
            self.method.statistics = statistics
            for name, value in adapted.items():
                self._own[name].data = value

    def _of_source(self, inputs: Inputs, count: bool = False) -> Tensor:
        with self._as_source():
            return self.method.forward(inputs, count=count).logits

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """While the source answers, the method takes no steps; windows and statistics go on."""
        self.method.paused = self.resting
        try:
            yield
        finally:
            self.method.paused = False

    # --- undoing --------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """What the method has learnt: not the images of a window, which are no fault of it."""
        whole = self.method.state_dict()
        return {name: value for name, value in whole.items() if name not in ("method", "settings", "source")}

    def _undo_learning(self) -> None:
        stats = self.stats  # what was spent stays spent
        if self.kept:
            *self.kept, last = self.kept
            self.method.take(last)
        else:
            self.method.reset()
        self.stats = stats

    # --- life -----------------------------------------------------------------------------------------------------

    def snapshot(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As the inner adapter's; the source while that answers. One net can't stand for both of them."""
        if not self.resting:
            return super().snapshot(*args, **kwargs)
        with self.lock, self._as_source():
            return self.method.snapshot()


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _surer(adapted: Tensor, source: Tensor) -> Tensor:
    """Of each sample, the logits of the one that is surer; the source's where the other's are not numbers."""
    sure, source_sure = (functional.probabilities(logits).amax(1) for logits in (adapted, source))
    return torch.where((sure >= source_sure).view(-1, *[1] * (adapted.dim() - 1)), adapted, source)


def _classes(probabilities: Tensor) -> Tensor:
    """Effective number of classes predicted: exp of the entropy of their shares. How sure a model is does not count."""
    shares = torch.zeros_like(probabilities).scatter_(1, probabilities.argmax(1, keepdim=True), 1).mean(0)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()
