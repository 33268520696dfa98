"""Adapter: the one loop (forward, choose, step), with reset, state and stats."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eata import functional, norm, rows, state
from eata.errors import EataError

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Backward = Literal["rows", "full"]


@dataclasses.dataclass
class Stats:
    """What adaptation has cost so far, in samples as the paper counts them.

    Attributes:
        forwards: samples predicted ('#Forwards'; two for each sample of Tent (episodic), 33 of MEMO with 32 copies).
        backwards: samples that took part in a gradient step ('#Backwards'; those that passed both filters).
        reliable: samples that passed the first filter (entropy).
        steps: optimizer steps.
        rejected: samples left out because their input, or the net's output for them, was NaN or infinite.
    """

    forwards: int = 0
    backwards: int = 0
    reliable: int = 0
    steps: int = 0
    rejected: int = 0


@dataclasses.dataclass
class Choice:
    """Which samples of a batch count, and how much.

    Attributes:
        index: positions of the chosen samples in the batch, ascending, (B',).
        weight: S(x) of each, (B',), without gradient.
        reliable: how many samples passed the first filter.
    """

    index: Tensor
    weight: Tensor
    reliable: int


class Adapter:
    """A net that predicts, and learns from what it sees. Base of every method; by itself it only predicts.

    The net is used in place: its flags, modes and buffers change and come back with ``unwrap()``. The logits are the
    net's output tensor, its ``.logits`` or ``["logits"]``, or the first item of a tuple.

    Input is checked before anything changes. Rows with NaN or infinity are left out: their logits are NaN, and the
    others are predicted and adapted on as if the bad ones had not been there.

    Args:
        net: the model.
        prior: samples that the source statistics of BatchNorm count for: infinity uses them alone, 0 the batch's alone.
        settings: the method's arguments, kept with its state.
    """

    def __init__(self, net: nn.Module, *, prior: float, **settings: Any) -> None:
        if not isinstance(net, nn.Module):
            raise TypeError(f"eata.{type(self).__name__} wraps a torch.nn.Module, not a {type(net).__name__}.")
        if any(parameter.is_inference() for parameter in net.parameters()):
            raise EataError(
                "This net was made under torch.inference_mode and can't be adapted; build it outside of it."
            )
        self.net = net
        self.stats = Stats()
        self.settings = {"prior": prior, **settings}
        self._prepared = norm.Prepared(net, f"eata.{type(self).__name__}", prior)
        self._undo = weakref.finalize(self, self._prepared.restore)
        self._learning = True
        self._channels_last = True
        self._batch_norm = prior == 0 and norm.has_batch_norm(net)
        self._warned: set[str] = set()
        self._source_digest: str | None = None

    # --- the loop -------------------------------------------------------------------------------------------------

    def __call__(self, x: Tensor) -> Tensor:
        """Predict a batch, then adapt. The logits are those from before the step.

        Args:
            x: a batch as the net takes it, samples first.

        Returns:
            Logits (B, C) or (B, C, ...), without gradient.
        """
        self._require_wrapped()
        # The caller's no_grad or inference_mode governs the caller's code; a step needs a graph all the same.
        with torch.inference_mode(False), torch.set_grad_enabled(True):
            x = self._checked(x)
            good = _finite_rows(x)
            if good is None:
                return self._predict_and_adapt(x)
            return self._without_bad_rows(x, good)

    def _predict_and_adapt(self, x: Tensor) -> Tensor:
        """One clean batch. Methods that learn override this."""
        with torch.no_grad():
            logits = self._forward_in_best_layout(x)
        self.stats.forwards += len(x)
        return logits

    def _forward_in_best_layout(self, x: Tensor) -> Tensor:
        """Logits of images that lie pixel by pixel, which CPU kernels like best (0.8 of the time)."""
        if not self._channels_last or x.dim() != 4 or x.device.type != "cpu":
            return self._forward(x)
        with contextlib.suppress(Exception):
            return self._forward(x.contiguous(memory_format=torch.channels_last))
        logits = self._forward(x)  # the net's own errors come again
        self._channels_last = False  # it takes images apart by .view(), say, which does not run on every layout
        return logits

    def _forward(self, x: Tensor) -> Tensor:
        """The net's logits for a batch, checked."""
        if self._batch_norm and len(x) == 1:
            self._warn_once(
                "A batch of 1 under BatchNorm is normalized by that one image, and accuracy falls to chance; "
                "wrap the model in eata.Window, or collect larger batches."
            )
        try:
            output = self.net(x)
        except ValueError as problem:
            if "more than 1 value per channel" not in str(problem):
                raise
            with self._prepared.source_statistics():  # one value per channel has no variance
                output = self.net(x)
        except RuntimeError as problem:
            if (
                "size" in str(problem)
                or "shape" in str(problem)
                or "dimension" in str(problem)
                or "channels" in str(problem)
            ):
                raise EataError(f"The net does not take input of shape {tuple(x.shape)}: {problem}") from problem
            raise
        logits = logits_of(output)
        if logits.dim() < 2 or len(logits) != len(x):
            raise EataError(
                f"The net gave logits of shape {tuple(logits.shape)} for input of shape {tuple(x.shape)}; eata needs "
                "(B, C) or (B, C, ...) with the batch first on both sides: add the batch dimension with x[None]?"
            )
        if logits.shape[1] < 2:
            raise EataError(f"The net has {logits.shape[1]} class; entropy needs at least 2.")
        return logits

    def _without_bad_rows(self, x: Tensor, good: Tensor) -> Tensor:
        if good.any():
            logits = self._predict_and_adapt(x[good])
        else:
            with torch.no_grad():  # only for the shape of the answer
                logits = self._forward(torch.zeros_like(x[:1]).expand(2, *x.shape[1:]))[:0]
        self.stats.rejected += int((~good).sum())
        filled = logits.new_full((len(x), *logits.shape[1:]), math.nan)
        filled[good] = logits
        return filled

    def _checked(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"The input is a {type(x).__name__}; eata takes a batch as one tensor.")
        if x.dim() == 0 or len(x) == 0:
            raise EataError(f"The batch is empty (shape {tuple(x.shape)}); skip it.")
        if not x.is_floating_point() and x.dim() > 2:
            raise EataError(
                f"The images are {x.dtype}; the net wants floats, normalized as in its training "
                "(for example (x / 255 - mean) / std)."
            )
        device = next(self.net.parameters(), x).device
        if x.device != device:
            raise EataError(f"The input is on {x.device} and the net on {device}; use x.to({str(device)!r}).")
        return x.clone() if x.is_inference() else x

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=5)

    # --- life -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Predict only, for as long as the block lasts: ``with model.frozen(): model(x)``."""
        before, self._learning = self._learning, False
        try:
            yield
        finally:
            self._learning = before

    def reset(self) -> None:
        """Back to the source: weights, optimizer, moving average and stats, everything."""
        self._require_wrapped()
        self.stats = Stats()

    def unwrap(self) -> nn.Module:
        """Give the net back, with the caller's flags, modes and buffers; what was learnt stays in its weights."""
        self._undo()
        return self.net

    def _require_wrapped(self) -> None:
        if not self._undo.alive:
            raise RuntimeError("This adapter was unwrapped; wrap the net again to go on.")

    # --- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole adaptation state; with it, adaptation goes on bit for bit as if it had never stopped."""
        self._require_wrapped()
        return {
            "method": type(self).__name__,
            "settings": dict(self.settings),
            "source": self.source_digest(),
            "stats": dataclasses.asdict(self.stats),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over a state of the same method, settings and source model; any other raises and changes nothing."""
        self._require_wrapped()
        if not isinstance(saved, dict) or "method" not in saved:
            raise EataError("This is not an adaptation state; pass what state_dict() gave.")
        if saved["method"] != type(self).__name__:
            raise EataError(f"The state is of eata.{saved['method']}, and this is eata.{type(self).__name__}.")
        for name in self.state_dict():
            if name not in saved:
                raise EataError(f"The state has no '{name}', so it is of another version of eata; adapt anew.")
        if saved["source"] != self.source_digest():
            raise EataError("The state belongs to another model: its source weights differ; load those weights first.")
        for name, value in saved["settings"].items():
            if self.settings.get(name) != value:
                raise EataError(
                    f"The state was saved with {name}={value!r}, but this model has {name}="
                    f"{self.settings.get(name)!r}; build it with the same."
                )
        self._take_state(copy.deepcopy(saved))

    def _take_state(self, saved: dict[str, Any]) -> None:
        self.stats = Stats(**saved["stats"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one safetensors file, whole or not at all."""
        state.write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over the state in a file; one that is broken or of another model raises and changes nothing."""
        saved = state.read(path)
        try:
            self.load_state_dict(saved)
        except ValueError as problem:
            raise EataError(f"{path}: {problem}") from None

    def source_digest(self) -> str:
        """Hash of the source weights and statistics, the identity of the model."""
        if self._source_digest is None:
            with self._prepared.source_statistics():
                tensors = dict(self.net.state_dict())
            tensors.update(self._source_values())
            self._source_digest = state.digest(tensors.items())
        return self._source_digest

    def _source_values(self) -> dict[str, Tensor]:
        """Source values, by name, of whatever this method changes."""
        return {}


class GradientAdapter(Adapter):
    """An adapter that takes gradient steps. A method says which samples count and what holds the weights back.

    Args:
        net: the model.
        lr: learning rate of the default optimizer, SGD with momentum 0.9.
        optimizer: function from a list of parameters to a torch optimizer, instead of the default (``lr`` is then its
            own affair).
        backward: ``"rows"`` spends the backward pass on the chosen samples only; ``"full"`` is the textbook gradient.
        layers: adapt only the last ``layers`` normalization layers; None means all.
        lean: with ``"rows"``, keep in memory only what training scale and shift needs.
        prior: as in ``Adapter``.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        lr: float,
        optimizer: MakeOptimizer | None,
        backward: Backward,
        layers: int | None = None,
        lean: bool = False,
        prior: float = 0,
    ) -> None:
        in_range("lr", lr, low=0.0, open_low=True)
        if backward not in ("rows", "full"):
            raise EataError(f"backward={backward!r} is neither 'rows' nor 'full'.")
        if layers is not None and layers < 1:
            raise EataError(f"layers={layers} leaves nothing to adapt; use 1 or more, or None for all.")
        if lean and backward != "rows":
            raise EataError("lean=True needs backward='rows'.")
        free = self._free_parameters(net, layers)
        super().__init__(net, prior=prior, lr=lr, backward=backward, layers=layers, lean=lean)
        self.parameters = free
        for parameter in free.values():
            parameter.requires_grad_(True)
        self.source = {name: parameter.detach().clone() for name, parameter in free.items()}
        self._engine = rows.Engine(lean) if backward == "rows" else None
        self._make_optimizer = optimizer if optimizer is not None else lambda parameters: _sgd(parameters, lr)
        self.optimizer = self._make_optimizer(list(free.values()))

    def _free_parameters(self, net: nn.Module, layers: int | None) -> dict[str, nn.Parameter]:
        """What is updated: scale and shift of the normalization layers."""
        free = norm.affine_parameters(net, layers)
        if not free:
            raise EataError(f"eata.{type(self).__name__} has nothing to adapt. {norm.check(net)[0]}")
        return free

    # --- the two answers of a method --------------------------------------------------------------------------------

    def select(self, logits: Tensor) -> Choice:
        """Which samples of these logits (detached) count, and how much."""
        raise NotImplementedError

    def penalty(self) -> Tensor | None:
        """What holds the weights back, added to the loss; None for nothing."""
        return None

    def _chosen(self, logits: Tensor, choice: Choice) -> None:
        """Called once a step on ``choice`` was taken."""

    # --- the loop -------------------------------------------------------------------------------------------------

    def _predict_and_adapt(self, x: Tensor) -> Tensor:
        if not self._learning:
            return super()._predict_and_adapt(x)
        engine = self._engine
        logits = self._forward(x) if engine is None else engine.forward(self.net, lambda: self._forward(x))
        self.stats.forwards += len(x)
        self._adapt(logits)
        return logits.detach()

    def _adapt(self, logits: Tensor) -> None:
        """One step on the samples of ``logits`` that are worth one, unless something about it is not finite."""
        seen = logits.detach()
        bad = _finite_rows(seen)
        if bad is not None:
            self.stats.rejected += int((~bad).sum())
            self._warn_once("The net gave NaN or infinite logits for finite input; no step is taken on such batches.")
            return
        choice = self.select(seen)
        self.stats.reliable += choice.reliable
        self._learn(logits, choice)

    def _learn(self, logits: Tensor, choice: Choice) -> None:
        """One step on the chosen samples, if any, and what the method remembers of them."""
        if len(choice.index) and self._step(self._gradients(logits, choice), len(choice.index)):
            self._chosen(logits.detach(), choice)

    def _step(self, gradients: tuple[Tensor | None, ...], samples: int) -> bool:
        """One optimizer step, which ``samples`` samples took part in; none if a gradient is not finite."""
        if not all(bool(torch.isfinite(gradient.sum())) for gradient in gradients if gradient is not None):
            self._warn_once("The gradient of a batch was not finite; no step was taken on it.")
            return False
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.stats.backwards += samples
        self.stats.steps += 1
        return True

    def _gradients(self, logits: Tensor, choice: Choice) -> tuple[Tensor | None, ...]:
        def loss_of(chosen: Tensor) -> Tensor:
            loss = (choice.weight * functional.entropy(chosen)).mean()
            penalty = self.penalty()
            return loss if penalty is None else loss + penalty

        parameters = list(self.parameters.values())
        if self._engine is not None:
            return self._engine.gradients(logits, choice.index, loss_of, parameters)
        return torch.autograd.grad(loss_of(logits[choice.index]), parameters, allow_unused=True)

    # --- life and state -------------------------------------------------------------------------------------------

    def restore_source(self) -> None:
        """Source weights and a fresh optimizer; stats and the method's memory stay."""
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.source[name])
        self.optimizer = self._make_optimizer(list(self.parameters.values()))

    def reset(self) -> None:
        super().reset()
        self.restore_source()

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["parameters"] = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        saved["source_parameters"] = dict(self.source)
        saved["optimizer"] = copy.deepcopy(self.optimizer.state_dict())
        return saved

    def _take_state(self, saved: dict[str, Any]) -> None:
        optimizer = self._make_optimizer(list(self.parameters.values()))
        optimizer.load_state_dict(saved["optimizer"])
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(saved["parameters"][name])
        self.optimizer = optimizer
        super()._take_state(saved)

    def _source_values(self) -> dict[str, Tensor]:
        return self.source


def logits_of(output: Any) -> Tensor:
    """The logits in a net's output: itself, its ``.logits`` or ``["logits"]``, or the first item of a tuple.

    >>> logits_of((torch.zeros(1, 2), "features")).shape
    torch.Size([1, 2])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        found: Tensor = output.logits
        return found
    if isinstance(output, dict):
        output = output.get("logits")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError("The net's output is no tensor, has no 'logits' and is no tuple that begins with a tensor.")
    return output


def in_range(name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """Raise an error that names the argument unless low <= value <= high (low < value where open)."""
    inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
    if not inside:
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        if high < math.inf:
            bound += f" and at most {high:g}"
        raise EataError(f"{name}={value!r} is out of range: it has to be {bound}.")


def _finite_rows(x: Tensor) -> Tensor | None:
    """None if every row is finite (the usual case, one cheap sum), else a mask (B,) of those that are."""
    if not x.is_floating_point() or bool(torch.isfinite(x.sum())):
        return None
    mask = torch.isfinite(x.flatten(1)).all(1) if x.dim() > 1 else torch.isfinite(x)
    return None if bool(mask.all()) else mask


def _sgd(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    # Fused: one pass over many tiny tensors instead of several ops for each.
    fused = all(p.device.type in ("cpu", "cuda") and p.dtype in (torch.float32, torch.float64) for p in parameters)
    return torch.optim.SGD(parameters, lr, momentum=0.9, fused=fused)
