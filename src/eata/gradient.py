"""GradientAdapter: an adapter that takes gradient steps. What a method has to say is two or three of its hooks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from eata import functional, norm, rows, state
from eata.adapter import Adapter
from eata.auto import Prior, statistics_for
from eata.check import nothing_to_adapt
from eata.errors import EataError, StateError, unknown
from eata.inputs import finite_rows, in_range
from eata.passes import Pass
from eata.rows import Gradients

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
NamedOptimizer = Literal["sgd", "nesterov", "adam"]
Backward = Literal["auto", "rows", "full"]
Score = Callable[[Tensor], Tensor]

LOSS_SCALE = 2.0**16  # of a float16 backward pass at first, as torch.amp.GradScaler's
GROW_AFTER = 2000  # good steps until a lowered scale is doubled again


class Shared(TypedDict, total=False):
    """The arguments that every gradient method takes; `GradientAdapter` says what they mean."""

    lr: float
    optimizer: MakeOptimizer | NamedOptimizer | None
    score: Score
    prior: Prior
    backward: Backward
    layers: int | None
    lean: bool


@dataclasses.dataclass
class Choice:
    """Which samples of a batch count, and how much.

    Attributes:
        index: positions of the chosen samples in the batch, ascending, (B',).
        weight: S(x) of each, (B',), without gradient.
        reliable: how many samples passed the first filter.
        count: how many samples the loss is the mean of; default B'. The loop makes both numbers those of all processes.
    """

    index: Tensor
    weight: Tensor
    reliable: int
    count: int = -1

    def __post_init__(self) -> None:
        if self.count < 0:
            self.count = len(self.index)

    @classmethod
    def of(cls, chosen: Tensor, weight: Tensor, reliable: Tensor) -> Choice:
        """From masks (B,) of the chosen and of the reliable samples and the weight of all, (B,).

        The masks go to the host together: waiting for a device is what costs there.
        """
        masks = torch.stack([chosen, reliable]).cpu().numpy()
        index = torch.from_numpy(masks[0].nonzero()[0]).to(chosen.device)
        return cls(index, weight[index], int(masks[1].sum()))


class GradientAdapter(Adapter):
    """An adapter that takes gradient steps, by default on the scale and shift of the normalization layers.

    Args:
        net: the model.
        lr: learning rate; the paper's 0.00025 for ImageNet.
        optimizer: ``"sgd"`` (momentum 0.9; the default), ``"nesterov"`` (the same, Nesterov's) or ``"adam"``; or a
            function from a list of parameters to a torch optimizer (``lr`` is then its own affair).
        score: what is minimized, from logits (B, C) to a number for each sample (B,); default the entropy.
        prior: samples that the source's BatchNorm statistics count for beside the batch's; default 0, the batch's
            alone, as in the papers. ``"auto"``: chosen by the stream (`eata.auto`); ``model.share`` says what is in
            use.
        backward: ``"rows"`` spends the backward pass on the chosen samples only; ``"full"`` is the textbook gradient;
            ``"auto"`` (default) takes rows on the CPU and full elsewhere.
        layers: adapt only the last ``layers`` normalization layers; None means all.
        lean: with rows, keep in memory only what training scale and shift needs.
    """

    score: Score
    #: of a float16 backward pass, and good steps since it was changed
    loss_scale: list[float]

    def __init__(
        self,
        net: nn.Module,
        *,
        lr: float = 0.00025,
        optimizer: MakeOptimizer | NamedOptimizer | None = None,
        score: Score = functional.entropy,
        prior: Prior = 0,
        backward: Backward = "auto",
        layers: int | None = None,
        lean: bool = False,
        statistics: norm.Statistics | None = None,
    ) -> None:
        in_range("lr", lr, low=0.0, open_low=True)
        if backward not in ("auto", "rows", "full"):
            raise EataError(f"backward={backward!r} is neither 'auto', 'rows' nor 'full'.")
        if layers is not None and layers < 1:
            raise EataError(f"layers={layers} leaves nothing to adapt; use 1 or more, or None for all.")
        if lean and backward == "full":
            raise EataError("lean=True needs backward='rows'.")
        if not callable(score):
            raise EataError(f"score={score!r} is no function; give eata.functional.come_entropy, say, or your own.")
        # What can fail comes before the net is touched.
        self.require_adaptable(net)
        statistics = statistics or statistics_for(prior, net)
        free = self.free_parameters(net, layers)
        if not free:
            raise EataError(f"eata.{type(self).__name__} has nothing to adapt. {nothing_to_adapt(net)}")
        make = optimizer if callable(optimizer) else _named_optimizer(optimizer or "sgd", lr)
        made = make(list(free.values()))
        on_cpu = all(parameter.device.type == "cpu" for parameter in free.values())
        by_rows = backward == "rows" or (backward == "auto" and on_cpu)
        super().__init__(net, statistics=statistics, engine=rows.Engine(lean) if by_rows else None)
        #: what is updated, by name
        self.parameters = free
        #: its values before adaptation
        self.source = {name: parameter.detach().clone() for name, parameter in free.items()}
        self.optimizer = made
        self._make_optimizer = make
        self.declare(score=score, prior=prior, backward=backward, layers=layers, lean=lean)
        self.remember("loss_scale", [LOSS_SCALE, 0])
        for parameter in free.values():
            parameter.requires_grad_(True)

    def free_parameters(self, net: nn.Module, layers: int | None) -> dict[str, nn.Parameter]:
        """What is updated: scale and shift of the normalization layers."""
        return norm.affine_parameters(net, layers)

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer, as it is now; may be set."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    # --- what a method may say --------------------------------------------------------------------------------------

    def select(self, batch: Pass) -> Choice:
        """Which samples of the batch count, and how much: all of them alike."""
        everything = torch.arange(len(batch), device=batch.logits.device)
        return Choice(everything, batch.logits.new_ones(len(batch)), len(batch))

    def loss(self, logits: Tensor, batch: Pass, choice: Choice) -> Tensor:
        """The loss of the chosen rows: the mean of their weighted scores.

        Args:
            logits: of the chosen rows, (B', C), with a gradient.
            batch: the whole batch.
            choice: which rows these are, and their weights.
        """
        return (choice.weight * self.score(logits)).sum() / choice.count

    def penalty(self) -> Tensor | None:
        """What holds the weights back, added to the loss; None for nothing."""
        return None

    def update(self, batch: Pass, choice: Choice) -> bool:
        """Learn from the chosen samples, ``choice.count`` in all; whether a step was taken.

        Default: one gradient, one step.
        """
        return self.step(self.gradients(batch, choice), choice.count)

    def after_step(self, batch: Pass, choice: Choice) -> None:
        """After a step on ``choice``: moving averages, teachers."""

    # --- the loop -------------------------------------------------------------------------------------------------

    @property
    def differentiable(self) -> list[Tensor]:
        """The free parameters."""
        return list(self.parameters.values())

    def learn(self, batch: Pass) -> None:
        """One step on the samples that are worth one, unless something about the batch is not finite."""
        good = finite_rows([batch.logits])
        (bad,) = batch.counts(0 if good is None else int((~good).sum()))
        if bad:
            self.stats.rejected += bad
            self.warn_once("The net gave NaN or infinite logits for finite input; no step is taken on such batches.")
            return
        choice = self.select(batch)
        choice.count, choice.reliable = batch.counts(choice.count, choice.reliable)
        self.stats.reliable += choice.reliable
        if choice.count and self.update(batch, choice):
            self.after_step(batch, choice)

    def gradients(self, batch: Pass, choice: Choice) -> Gradients:
        """Gradients of ``loss`` on the chosen rows plus ``penalty``, one for each free parameter."""
        scale = self._scale(batch.logits.device)
        found = batch.gradients(choice.index, lambda logits: scale * self.loss(logits, batch, choice))
        if scale != 1:
            found = tuple(None if g is None else g / scale for g in found)
        penalty = self.penalty()
        if penalty is None:
            return found
        held = torch.autograd.grad(penalty, self.differentiable, allow_unused=True)
        return tuple(b if a is None else a if b is None else a + b for a, b in zip(found, held, strict=True))

    def step(self, gradients: Gradients, samples: int) -> bool:
        """One optimizer step, which ``samples`` samples took part in; none if a gradient is not finite, or paused."""
        present = [gradient for gradient in gradients if gradient is not None]
        if not present or self.paused:
            return False
        # One look at the device for all: a sum is finite unless a value is not.
        finite = bool(torch.isfinite(torch.stack([gradient.sum() for gradient in present]).sum()))
        self._rescale(present[0].device, finite)
        if not finite:
            self.warn_once("The gradient of a batch was not finite; no step was taken on it.")
            return False
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.stats.backwards += samples
        self.stats.steps += 1
        return True

    # Under float16 autocast small gradients would vanish, so the loss is scaled up, as torch.amp.GradScaler does.

    def _scale(self, device: torch.device) -> float:
        return float(self.loss_scale[0]) if _is_float16(device) else 1.0

    def _rescale(self, device: torch.device, finite: bool) -> None:
        if _is_float16(device):
            scale, good = self.loss_scale
            if not finite:
                self.loss_scale = [scale / 2, 0]
            else:
                self.loss_scale = [2 * scale, 0] if good + 1 >= GROW_AFTER else [scale, good + 1]

    # --- life and state -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def using(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Forward by other values of the free parameters (a teacher's, the source's), for as long as the block lasts.

        They change places with the own ones and nothing is copied, so passes made before keep their gradient.
        """
        own = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = values[name]
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = own[name]

    def source_weights(self) -> contextlib.AbstractContextManager[None]:
        return self.using(self.source)

    def restore_source(self) -> None:
        """Source weights and a fresh optimizer; stats and what is remembered stay."""
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.source[name])
        self.optimizer = self._make_optimizer(list(self.parameters.values()))

    def reset(self) -> None:
        with self.lock:
            super().reset()
            self.restore_source()

    @property
    def settings(self) -> dict[str, Any]:
        """The method's arguments as they are now, and those of its optimizer."""
        options = ", ".join(f"{name}={value}" for name, value in self.optimizer.defaults.items() if name != "lr")
        return {"lr": self.lr, **super().settings, "optimizer": f"{type(self.optimizer).__name__}({options})"}

    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            return {
                **super().state_dict(),
                "parameters": {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            }

    def take(self, saved: dict[str, Any]) -> None:
        self._take_parameters(saved["parameters"], saved["optimizer"])
        super().take(saved)

    def _take_parameters(self, values: dict[str, Tensor], optimizer_state: dict[str, Any]) -> None:
        if values.keys() != self.parameters.keys():
            raise StateError("The state adapts other parameters than this model; build it with the same layers.")
        optimizer = self._make_optimizer(list(self.parameters.values()))
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])
        self.optimizer = optimizer

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        super().move(device, dtype)
        self.source = state.moved(self.source, device, dtype)
        self._take_parameters(dict(self.parameters), self.optimizer.state_dict())

    def source_values(self) -> dict[str, Tensor]:
        return self.source


def _is_float16(device: torch.device) -> bool:
    kind = device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16


def _named_optimizer(name: str, lr: float) -> MakeOptimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, momentum=0.9),
        "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
        "adam": torch.optim.Adam,
    }
    if name not in makers:
        raise unknown("optimizer", name, makers)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # Fused: one pass over many tiny tensors instead of several ops for each.
        fused = all(p.device.type in ("cpu", "cuda") and p.dtype in (torch.float32, torch.float64) for p in parameters)
        return makers[name](parameters, lr=lr, fused=fused)

    return make
