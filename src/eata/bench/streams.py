"""The streams of the real world: in which order, and under which shifts, the images of a set come.

A stream is a list of parts, each a set of images under one corruption in an order of its own. It depends on the seed
and the labels and on nothing else, so every method sees the same. Names, alone or joined by '+' (one of the first five
and one of the others):

| name | what |
|---|---|
| ``reset`` | the paper's: each corruption for itself, by a fresh model |
| ``continual`` | one corruption after another, never reset (the paper's 'lifelong') |
| ``gradual`` | continual, each at severities 1 2 3 4 5 4 3 2 1 |
| ``mixed`` | all corruptions shuffled |
| ``recurring:N`` | the continual stream N times |
| ``correlated`` | within a part, sorted by class |
| ``correlated:DELTA`` | softer: each class spread over the part by a Dirichlet draw; the smaller, the more sorted |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eata.errors import EataError, unknown

Order = NDArray[np.int64]

SHIFTS = ("reset", "continual", "gradual", "mixed", "recurring")
CORRELATED = "correlated"
GRADUAL = (1, 2, 3, 4, 5, 4, 3, 2, 1)


@dataclass(frozen=True)
class Recipe:
    """How a stream is made.

    Attributes:
        shift: how corruptions follow one another, one of ``SHIFTS``.
        rounds: times that all of it comes.
        delta: None: shuffled; 0: sorted by class; above: Dirichlet.
    """

    shift: str = "reset"
    rounds: int = 1
    delta: float | None = None

    @property
    def name(self) -> str:
        """As it is written."""
        shift = f"{self.shift}:{self.rounds}" if self.shift == "recurring" else self.shift
        if self.delta is None:
            return shift
        order = f"{CORRELATED}:{self.delta:g}" if self.delta else CORRELATED
        return order if shift == "continual" else f"{shift}+{order}"


@dataclass(frozen=True)
class Part:
    """Images under one shift, in one piece of a stream.

    Attributes:
        shifts: corruption and severity; several where they are mixed image by image.
        seed: of the order; another for each part.
        delta: as in ``Recipe``.
    """

    shifts: tuple[tuple[str | None, int], ...]
    seed: int
    delta: float | None = None


def parse(text: str) -> Recipe:
    """The recipe of a stream by name.

    >>> parse("gradual+correlated:0.1")
    Recipe(shift='gradual', rounds=1, delta=0.1)
    >>> parse("correlated").name, parse("recurring:5").name
    ('correlated', 'recurring:5')
    """
    recipe, named = Recipe(), set[str]()
    for word in text.split("+"):
        name, colon, value = word.strip().partition(":")
        if name not in (*SHIFTS, CORRELATED):
            raise unknown("stream", name, (*SHIFTS, CORRELATED))
        kind = CORRELATED if name == CORRELATED else "shift"
        if kind in named:
            raise EataError(f"The stream {text!r} says twice how it is to be; take one of {', '.join(SHIFTS)}.")
        named.add(kind)
        if name == CORRELATED:
            recipe = replace(recipe, delta=_delta(value, text) if colon else 0.0)
        elif name == "recurring":
            recipe = replace(recipe, shift=name, rounds=_rounds(value, text))
        elif colon:
            raise EataError(f"The stream {name!r} takes no number; write {name!r} alone.")
        else:
            recipe = replace(recipe, shift=name)
    # Sorted by class with a reset for each corruption is not what 'correlated' means in the field.
    return replace(recipe, shift="continual") if named == {CORRELATED} else recipe


def _delta(value: str, text: str) -> float:
    try:
        delta = float(value)
    except ValueError:
        delta = math.nan
    if not 0 < delta < math.inf:
        raise EataError(f"The stream {text!r} needs a Dirichlet delta above 0, such as correlated:0.1.")
    return delta


def _rounds(value: str, text: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise EataError(f"The stream {text!r} needs its number of rounds, 1 or more, such as recurring:5.")
    return int(value)


def parts(recipe: Recipe, corruptions: Sequence[str | None], severity: int, seed: int) -> list[Part]:
    """The parts of a stream in their order.

    Args:
        recipe: how it is made.
        corruptions: in their order.
        severity: 1 to 5; ``gradual`` climbs to it and down again.
        seed: of the order of the images.

    >>> [part.shifts for part in parts(parse("gradual"), ["fog"], 2, seed=0)]
    [(('fog', 1),), (('fog', 2),), (('fog', 1),)]
    >>> len(parts(parse("recurring:3"), ["fog", "snow"], 5, seed=0))
    6
    """
    if recipe.shift == "mixed":
        rounds = [[tuple((name, severity) for name in corruptions)]]
    else:
        levels = [level for level in GRADUAL if level <= severity] if recipe.shift == "gradual" else [severity]
        if recipe.shift == "gradual" and severity < max(GRADUAL):
            levels = [*range(1, severity), *range(severity, 0, -1)]
        rounds = [[((name, level),) for name in corruptions for level in levels]] * recipe.rounds
    # The order is the same under every corruption, as in the paper's stream; a second round comes in another.
    return [Part(shifts, seed + turn, recipe.delta) for turn, one in enumerate(rounds) for shifts in one]


def order(part: Part, labels: Sequence[int] | NDArray[np.int64]) -> Order:
    """In which order the images of a part come, (N,) of their numbers.

    With several shifts the sets are laid end to end: number n is image n % len(labels) of shift n // len(labels).

    Args:
        part: of a stream.
        labels: of the images of one shift.

    >>> order(Part((("fog", 5),), seed=0, delta=0.0), [2, 0, 1, 0]).tolist()
    [3, 1, 2, 0]
    """
    own = np.asarray(labels, dtype=np.int64)
    if part.delta is not None and (not len(own) or own.min() < 0):
        raise EataError("A correlated stream sorts images by class, and these have no labels; take another stream.")
    everything = np.tile(own, len(part.shifts))
    # RandomState is the one generator of numpy whose draws are promised to stay the same in later versions.
    random = np.random.RandomState(part.seed)
    shuffled = random.permutation(len(everything))
    if part.delta is None:
        return shuffled
    if part.delta == 0:
        return shuffled[np.argsort(everything[shuffled], kind="stable")]
    return _dirichlet(shuffled, everything, part.delta, random)


def _dirichlet(shuffled: Order, labels: Order, delta: float, random: np.random.RandomState) -> Order:
    """The stream is cut into as many slots as there are classes; each class is spread over them by its own draw."""
    classes = np.unique(labels)
    slots: list[list[Order]] = [[] for _ in classes]
    for label in classes:
        own = shuffled[labels[shuffled] == label]
        # Gammas over their sum, in logarithms: with a small delta all of them may be too small for a float.
        logs = np.log(random.gamma(delta + 1, size=len(classes))) + np.log(random.uniform(size=len(classes))) / delta
        shares = np.exp(logs - logs.max())
        ends = np.round(np.cumsum(shares / shares.sum()) * len(own)).astype(np.int64)
        for slot, piece in zip(slots, np.split(own, ends[:-1]), strict=True):
            slot.append(piece)
    return np.concatenate([np.concatenate([slot[i] for i in random.permutation(len(slot))]) for slot in slots])
