"""Adapter: the one loop (forward, select, update, answer), with reset, state and stats.

A batch goes through a few small steps, each a public method with a default. A method is the two or three that differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from eata import norm, state
from eata.check import hides_layers
from eata.errors import EataError, StateError
from eata.inputs import Inputs, checked
from eata.norm import Statistics
from eata.passes import Pass, Runner
from eata.rows import Engine


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


class Adapter:
    """A net that predicts, and learns from what it sees. Base of every method; by itself it only predicts.

    The net is used in place: its flags and modes change and come back with ``unwrap()``. Calling the adapter calls the
    net with the same tensors, positional or by keyword, each with the batch first. The answer is always the logits
    tensor: the net's output, its ``.logits`` or ``["logits"]``, or the first item of a tuple.

    Input is checked before anything changes. Rows with NaN or infinity are left out: their logits are NaN, and the
    others are predicted and adapted on as if the bad ones had not been there.

    One thread at a time: calls from several threads wait for one another.

    Args:
        net: the model.
        statistics: what BatchNorm layers normalize by.
        engine: for gradients on some rows.
    """

    #: whether the forward pass keeps the input of the last linear layer for the method
    needs_features = False
    #: whether ``eata.parallel`` may divide a batch: all that is summed over samples goes through ``Pass.total``
    divisible = False
    #: whether it is called with whole batches, and not with shards of them
    whole = True
    #: called with the logits of a batch before it is learnt from, where nothing that is learnt can change them any more
    on_answer: Callable[[Tensor], None] | None = None

    def __init__(self, net: nn.Module, *, statistics: Statistics, engine: Engine | None = None) -> None:
        self.require_adaptable(net)
        self.net = net
        self.statistics = statistics
        #: False inside of ``frozen()``: predict only
        self.learning = True
        #: True: no step is taken, while windows and statistics go on (``eata.Guard`` does that)
        self.paused = False
        self.lock = threading.RLock()
        #: what was declared with ``remember``
        self.memory = state.Memory(self)
        self._settings: list[str] = []
        self._warned: set[str] = set()
        self._source_digest: str | None = None
        self._undo = weakref.finalize(self, norm.Prepared(net, f"eata.{type(self).__name__}").restore)
        #: runs the net on a batch
        self.runner: Callable[..., Pass] = Runner(net, engine)
        self._place = _place(net)
        self._latest = 1  # samples of the latest batch
        self.stats = Stats()
        if statistics.carried:
            self.remember("carried", statistics.carried)

    def require_adaptable(self, net: nn.Module) -> None:
        """Raise if this net can't be wrapped, before anything is done to it."""
        name = f"eata.{type(self).__name__}"
        if not isinstance(net, nn.Module):
            raise TypeError(f"{name} wraps a torch.nn.Module, not a {type(net).__name__}.")
        if isinstance(net, torch.jit.ScriptModule):
            raise EataError(f"{name} can't wrap this net. {hides_layers(net)}")
        if any(parameter.is_inference() for parameter in net.parameters()):
            raise EataError(
                "This net was made under torch.inference_mode and can't be adapted; build it outside of it."
            )
        norm.require_unwrapped(net)

    @property
    def carried(self) -> dict[str, Any]:
        """What the statistics carry from batch to batch."""
        return self.statistics.carried

    @carried.setter
    def carried(self, value: dict[str, Any]) -> None:
        self.statistics.carried = value

    @property
    def share(self) -> float:
        """How much of the source is in the BatchNorm statistics now, 0 to 1; with a fixed prior, in the latest batch.

        The mean over the layers, where they differ.
        """
        return self.statistics.share(self._latest)

    def remember(self, name: str, value: Any) -> None:
        """Declare what the method carries from batch to batch: the attribute ``name``, ``value`` at first.

        Reset, state files and moves to a device follow from that. A value is None, a number, a string, a tensor, a
        list or dict of these, or a ``torch.Generator``.
        """
        self.memory.add(name, value)

    def declare(self, **settings: Any) -> None:
        """Declare the method's arguments: each becomes an attribute, and what it is then is saved with the state."""
        for name, value in settings.items():
            setattr(self, name, value)
            self._settings.append(name)

    @property
    def settings(self) -> dict[str, Any]:
        """The method's arguments as they are now; a function by its name."""
        values = {name: getattr(self, name) for name in self._settings}
        return {name: getattr(value, "__name__", value) if callable(value) else value for name, value in values.items()}

    # --- the loop -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict a batch, then adapt. The logits are those from before the step.

        Args:
            args: tensors as the net takes them, samples first.
            kwargs: the same, by name; what is no tensor goes to the net as it is.

        Returns:
            Logits (B, C) or (B, C, ...), without gradient.
        """
        # The caller's no_grad or inference_mode governs the caller's code; a step needs a graph all the same.
        with self.lock, torch.inference_mode(False), torch.set_grad_enabled(True):
            self.require_ready()
            inputs = self.checked(Inputs(*args, **kwargs))
            good = inputs.finite_rows()
            if good is None:
                return self.run(inputs)
            return self._without_bad_rows(inputs, good)

    def run(self, inputs: Inputs) -> Tensor:
        """One clean batch: forward, learn from it, answer."""
        if self.learning:
            self.statistics.prepare(
                len(inputs), lambda rows, statistics: self._logits_by(statistics, inputs.take(rows))
            )
        learns = self.learning and not self.paused and not self.statistics.rests
        with self.weights_in_use():
            batch = self.forward(inputs, grad=learns)
        if self.learning:
            self.statistics.notice(batch.logits)
        if learns:
            if self.on_answer is not None and type(self).answer is Adapter.answer:
                self.on_answer(batch.logits)
            self.learn(batch)
        return self.answer(batch)

    def _logits_by(self, statistics: Statistics, inputs: Inputs) -> Tensor:
        """Logits of some samples by other statistics, to see which are better."""
        self.stats.forwards += len(inputs)
        with self.source_weights():
            return self.runner(inputs, statistics).logits

    def source_weights(self) -> contextlib.AbstractContextManager[None]:
        """In which the net has the source's weights; a method that learns has others outside."""
        return contextlib.nullcontext()

    def weights_in_use(self) -> contextlib.AbstractContextManager[None]:
        """In which the net has the weights that belong to its statistics."""
        return self.source_weights() if self.statistics.rests else contextlib.nullcontext()

    def forward(self, inputs: Inputs, *, grad: bool = False, count: bool = True) -> Pass:
        """One forward of a batch, by the adapter's statistics; a method may call it again.

        Args:
            inputs: the batch.
            grad: whether gradients will be asked of it.
            count: whether it counts among ``stats.forwards``.
        """
        wanted = self.differentiable if grad else ()
        batch = self.runner(inputs, self.statistics, wanted, self.needs_features)
        if batch.samples == 1 and self.statistics.of_batch_alone and norm.has_batch_norm(self.net):
            self.warn_once(
                "A batch of 1 under BatchNorm is normalized by that one image, and accuracy falls to chance; "
                "wrap the model in eata.Window, or collect larger batches."
            )
        if count:
            self.stats.forwards += batch.samples
        self._latest = batch.samples
        return batch

    @property
    def differentiable(self) -> list[Tensor]:
        """What gradients are taken by; nothing in a method that only predicts."""
        return []

    def learn(self, batch: Pass) -> None:
        """Learn from a batch that was predicted; nothing in a method that only predicts."""

    def answer(self, batch: Pass) -> Tensor:
        """What the caller gets: the logits from before the step."""
        return batch.logits

    def checked(self, inputs: Inputs) -> Inputs:
        """The batch, if the net and the method can take it; else an error that says what to do."""
        return checked(inputs, self._place[0] if self._place else None)

    def _without_bad_rows(self, inputs: Inputs, good: Tensor) -> Tensor:
        if bool(good.any()):
            logits = self.run(inputs.take(good))
        else:  # only for the shape of the answer
            two = inputs.take(slice(0, 1)).map(lambda x: torch.zeros_like(x).expand(2, *x.shape[1:]))
            logits = self.forward(two, count=False).logits[:0]
        self.stats.rejected += int((~good).sum())
        filled = logits.new_full((len(inputs), *logits.shape[1:]), math.nan)
        filled[good] = logits
        return filled

    def unfit_for_window(self, exact: bool) -> str | None:
        """Why `eata.Window` can't stand in for the batches of this method; None where it can.

        Args:
            exact: the window forwards all of its samples each time.
        """
        return None

    def warn_once(self, text: str) -> None:
        """Say something that the user should know, the first time only."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=5)

    # --- life -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Predict only, for as long as the block lasts: ``with model.frozen(): model(x)``."""
        before, self.learning = self.learning, False
        try:
            yield
        finally:
            self.learning = before

    def reset(self) -> None:
        """Back to the source: weights, optimizer, what is remembered and stats, everything."""
        with self.lock:
            self.require_ready()
            self.memory.reset()
            self.stats = Stats()

    def unwrap(self) -> nn.Module:
        """Give the net back, with the caller's flags and modes; what was learnt stays in its weights."""
        self._undo()
        return self.net

    def snapshot(self, *args: Any, **kwargs: Any) -> nn.Module:
        """An independent net in eval mode that predicts as the adapter does now, for ``torch.export``, ONNX and so on.

        A net on its own has fixed statistics. Where the adapter uses the batch's, give it a batch: its statistics
        become the running ones, and the net then predicts that batch as the adapter would.

        Args:
            args: a batch, as in a call; not needed where BatchNorm uses the source's statistics, or there is none.
            kwargs: the same, by name.

        >>> import eata
        >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
        >>> model, x = eata.Tent(net, lr=0.1), torch.randn(8, 2)
        >>> _ = model(x)
        >>> with model.frozen():
        ...     torch.allclose(model.snapshot(x)(x), model(x), atol=1e-5)
        True
        """
        with self.lock, torch.inference_mode(False), torch.no_grad(), self.weights_in_use():
            self.require_ready()
            recording = norm.Recording(self.statistics)
            if norm.batch_norm_layers(self.net) and self.statistics.share(1) < 1:
                if not args and not kwargs:
                    raise EataError("This method normalizes by the batch, so snapshot() needs one: model.snapshot(x).")
                self.runner(self.checked(Inputs(*args, **kwargs)), recording)
            return norm.with_statistics(self.net, recording.seen)

    def to(self, *args: Any, **kwargs: Any) -> Adapter:
        """Move everything (net, source, optimizer, memory) to a device or type, as ``nn.Module.to`` does."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.require_ready()
            self.source_digest()  # of the weights as they were trained
            self.net.to(*args, **kwargs)
            self._place = _place(self.net)
            if self._place is not None:
                self.move(*self._place)
        return self

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Follow the net to a device and type."""
        self.memory.to(device, dtype)

    def require_ready(self) -> None:
        """Raise unless the net is still wrapped, and where it was."""
        if not self._undo.alive:
            raise RuntimeError("This adapter was unwrapped; wrap the net again to go on.")
        if _place(self.net) != self._place:
            raise EataError(
                "The net was moved or converted after it was wrapped, and what the adapter remembers was not: move the "
                "net back, and use model.to(...), which moves everything."
            )

    # --- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole adaptation state; with it, adaptation goes on bit for bit as if it had never stopped."""
        with self.lock:
            self.require_ready()
            return {
                "method": type(self).__name__,
                "settings": self.settings,
                "source": self.source_digest(),
                "stats": dataclasses.asdict(self.stats),
                "memory": self.memory.read(),
            }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over a state of the same method, settings and source model; any other raises and changes nothing."""
        with self.lock:
            self.require_ready()
            self.require_fit(saved)
            self.take(saved)

    def require_fit(self, saved: dict[str, Any]) -> None:
        """Raise unless this state can be taken over."""
        state.require_fit(saved, self.state_dict())

    def take(self, saved: dict[str, Any]) -> None:
        """Take over a state that fits."""
        self.memory.write(saved["memory"], next(self.net.parameters(), None))
        self.stats = Stats(**saved["stats"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one safetensors file, whole or not at all."""
        state.write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over the state in a file; one that is broken or of another model raises and changes nothing."""
        saved = state.read(path)
        try:
            self.load_state_dict(saved)
        except StateError as problem:
            raise StateError(f"{path}: {problem}") from None

    def source_digest(self) -> str:
        """Hash of the source weights and statistics, the identity of the model."""
        if self._source_digest is None:
            self._source_digest = state.digest({**self.net.state_dict(), **self.source_values()}.items())
        return self._source_digest

    def source_values(self) -> dict[str, Tensor]:
        """Source values, by name, of whatever this method changes."""
        return {}


def _place(net: nn.Module) -> tuple[torch.device, torch.dtype] | None:
    """Where a net is, told by its first parameter."""
    first = next(net.parameters(), None)
    return None if first is None else (first.device, first.dtype)
