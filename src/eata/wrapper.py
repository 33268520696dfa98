"""An adapter around another adapter: it leaves the method alone and changes when, or by what, the method works."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eata import state
from eata.adapter import Adapter, Stats
from eata.errors import EataError
from eata.inputs import Inputs
from eata.passes import Pass


class Wrapper(Adapter):
    """Base of what wraps an adapter. Net, stats, lock and ``frozen()`` are the inner one's.

    Args:
        model: an adapter.
    """

    def __init__(self, model: Adapter) -> None:
        if not model.whole:
            raise EataError(
                f"eata.{type(self).__name__} would see one shard of each batch, so it can't go around eata.parallel; a "
                "guard goes inside: eata.parallel(eata.Guard(model))."
            )
        # No super().__init__: the inner adapter has made the net ready.
        self.model = model
        self.net = model.net
        self.lock = model.lock
        self.memory = state.Memory(self)
        self._settings = []

    @property
    def stats(self) -> Stats:
        """Those of the inner method."""
        return self.model.stats

    @stats.setter
    def stats(self, value: Stats) -> None:
        self.model.stats = value

    @property
    def learning(self) -> bool:
        """Whether it learns: the inner one's, so that either can be frozen."""
        return self.model.learning

    @learning.setter
    def learning(self, value: bool) -> None:
        self.model.learning = value

    @property
    def share(self) -> float:
        """The inner one's."""
        return self.model.share

    def run(self, inputs: Inputs) -> Tensor:
        return self.model.run(inputs)

    def forward(self, inputs: Inputs, *, grad: bool = False, count: bool = True) -> Pass:
        return self.model.forward(inputs, grad=grad, count=count)

    def checked(self, inputs: Inputs) -> Inputs:
        return self.model.checked(inputs)

    def warn_once(self, text: str) -> None:
        self.model.warn_once(text)

    def require_ready(self) -> None:
        self.model.require_ready()

    def reset(self) -> None:
        with self.lock:
            self.model.reset()
            self.memory.reset()

    def unwrap(self) -> nn.Module:
        return self.model.unwrap()

    def snapshot(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self.model.snapshot(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Adapter:
        with self.lock:
            self.model.to(*args, **kwargs)
            first = next(self.net.parameters(), None)
            if first is not None:
                self.move(first.device, first.dtype)
        return self

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        self.memory.to(device, dtype)

    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            return {**super().state_dict(), "model": self.model.state_dict()}

    def require_fit(self, saved: dict[str, Any]) -> None:
        super().require_fit(saved)
        self.model.require_fit(saved["model"])

    def take(self, saved: dict[str, Any]) -> None:
        self.model.take(saved["model"])
        self.memory.write(saved["memory"], next(self.net.parameters(), None))

    def source_digest(self) -> str:
        return self.model.source_digest()
