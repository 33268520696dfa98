"""One adaptation in several processes of one machine, for a program that has whole batches."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch import distributed as dist

from eata.adapter import Adapter
from eata.errors import EataError
from eata.inputs import Inputs
from eata.parallel import parallel
from eata.wrapper import Wrapper

if TYPE_CHECKING:
    from typing_extensions import Self

START = timedelta(minutes=5)  # for all to meet, once each has its net
STEP = 120.0  # seconds that one waits for another within a batch


class Crew(Wrapper):
    """Several processes of this machine that work as one adapter, on the CPU.

    Each batch is divided among them, adapted on by all (`eata.parallel`), and its logits come back in order. Use it in
    a ``with`` block, at whose end the helpers end, and the adapter works alone again.

    Args:
        model: the adapter of this process.
        build: makes the same adapter in a helper process: a function at the top of a module, maybe in
            ``functools.partial``. The helpers take over the state of ``model``.
        processes: how many, this one included.
    """

    def __init__(self, model: Adapter, build: Callable[[], Adapter], processes: int) -> None:
        if dist.is_initialized():
            raise EataError("There is a process group already; call eata.parallel in each of its processes instead.")
        super().__init__(model)
        self._build, self._count = build, processes
        self._threads = max(1, torch.get_num_threads() // processes)
        self._ended = ExitStack()

    def __enter__(self) -> Self:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else's affair
        with ExitStack() as until:
            folder = until.enter_context(tempfile.TemporaryDirectory(prefix="eata-"))
            store = f"file://{folder}/store"
            self._pipes = [self._start(rank, store, until) for rank in range(1, self._count)]
            for rank, pipe in enumerate(self._pipes, 1):
                _received(pipe, rank)  # it has its net
                pipe.send(self.model.state_dict())
            until.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self._threads)
            until.callback(_leave)
            _join(store, 0, self._count)
            until.callback(setattr, self.model, "runner", self.model.runner)
            until.callback(setattr, self, "model", self.model)
            self.model = parallel(self.model, timeout=STEP)
            self._ended = until.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def _start(self, rank: int, store: str, until: ExitStack) -> Connection:
        context = torch.multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        given = (self._build, store, rank, self._count, self._threads, there)
        helper = context.Process(target=_help, args=given, daemon=True)
        helper.start()
        there.close()
        until.callback(helper.join, START.seconds)
        until.callback(here.close)  # before the join: it ends at the end of its pipe
        return here

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict a whole batch, then adapt, as the adapter would."""
        inputs = self.model.checked(Inputs(*args, **kwargs))
        cuts = [len(inputs) * rank // self._count for rank in range(self._count + 1)]
        own, *others = (inputs.take(slice(*cuts[rank : rank + 2])) for rank in range(self._count))
        amp = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        for pipe, shard in zip(self._pipes, others, strict=True):
            pipe.send((shard.map(torch.clone).tree(), self.learning, amp))
        logits = [self.model(*own.args, **own.kwargs)]
        logits += [_received(pipe, rank) for rank, pipe in enumerate(self._pipes, 1)]
        return torch.cat(logits)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def require_fit(self, saved: dict[str, Any]) -> None:
        self.model.require_fit(saved)

    def take(self, saved: dict[str, Any]) -> None:
        raise EataError("A crew at work can't take over a state; load it into the adapter before.")

    def reset(self) -> None:
        raise EataError("A crew at work can't be reset; end it, reset the adapter, and make another.")


def _received(pipe: Connection, rank: int) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise EataError(f"Process {rank} ended; what it said of that is above.") from None


def _join(store: str, rank: int, count: int) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=START)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _help(build: Callable[[], Adapter], store: str, rank: int, count: int, threads: int, pipe: Connection) -> None:
    """A helper's life: until its pipe ends, or another process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started it
    torch.set_num_threads(threads)
    adapter = build()
    pipe.send("ready")
    try:
        adapter.load_state_dict(pipe.recv())
        _join(store, rank, count)
        model = parallel(adapter, timeout=STEP)
        while True:
            tree, model.learning, amp = pipe.recv()
            precision: AbstractContextManager[object] = nullcontext() if amp is None else torch.autocast("cpu", amp)
            shard = Inputs.of(tree)
            with precision:
                pipe.send(model(*shard.args, **shard.kwargs))
    except (EOFError, OSError, EataError) as end:
        if isinstance(end, EataError):
            print(f"eata: process {rank}: {end}", file=sys.stderr)
        _leave()
