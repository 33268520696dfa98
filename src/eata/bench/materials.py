"""What the cells of a run share: streams, networks, Fisher information; each is made once."""

from __future__ import annotations

import contextlib
import copy
import errno
import math
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor, nn

import eata
from eata import methods, state
from eata.bench.protocol import Request, digest, slug
from eata.data import CORRUPTIONS, Stream
from eata.data.kept import KeptStream, keep
from eata.errors import EataError
from eata.importance import BATCH, Fisher, Per

Batches = Iterator[tuple[Tensor, Tensor]]

STREAMS_KEPT = 16  # the 15 corruptions of one severity and the clean set
KEPT_BYTES = 300_000_000  # of a stream on disk: 2,000 images of 224x224; a larger one is decoded as it is read
STREAMS = "streams"


class Materials:
    """Streams, networks and Fisher information of one request.

    Args:
        request: the run's.
        folder: the run's folder, where decoded and corrupted images and the Fisher information are kept, so that the
            run's processes make them once; None keeps them in memory.
    """

    def __init__(self, request: Request, folder: Path | None = None) -> None:
        self.request = request
        self.folder = folder
        self.device = torch.device(request.device)
        self.stream = lru_cache(STREAMS_KEPT)(self._stream)
        self.net = lru_cache(maxsize=None)(self._net)
        self.fisher = lru_cache(maxsize=None)(self._fisher)

    # --- networks -------------------------------------------------------------------------------------------------

    def _net(self, name: str) -> nn.Module:
        return eata.models.load(name).eval()

    def config(self, name: str) -> dict[str, Any]:
        """What the network says of its input and its classes."""
        config: Any = self.net(name).pretrained_cfg
        for key in ("mean", "std", "input_size", "num_classes"):
            if key not in config:
                raise EataError(f"{name} does not say its {key}: set net.pretrained_cfg[{key!r}] where it is built.")
        return dict(config)

    def fresh(self, name: str) -> nn.Module:
        """A copy of the network on the run's device, with the data's classes only."""
        net = copy.deepcopy(self.net(name)).to(self.device)
        index = self.example(name).class_index
        return net if index is None else Restricted(net, index).to(self.device)

    def preset(self, name: str) -> str:
        """The name of the preset that goes with the data, or with the network where the data is the user's own."""
        if not self.request.data.startswith("folder:"):
            return self.request.traits.preset
        return methods.preset_for(self.config(name)["num_classes"])

    def _fisher(self, name: str, samples: int, per: Per) -> Fisher:
        def make() -> Fisher:
            batches = self.batches(self.clean(name, None), name, BATCH, 2020)
            images = (x.to(self.device) for x, _ in islice(batches, -(-samples // BATCH)))
            return eata.fisher(self.fresh(name), images, samples=samples, per=per)

        if self.folder is None:
            return make()
        path = self.folder / "fisher" / f"{slug(name)}-{digest([name, samples, per, 'curvature'])}.safetensors"

        def write() -> None:
            made = make()
            state.write(path, {"omega": dict(made), "per": made.per, "curvature": made.curvature})

        once(path, write)
        kept = state.moved(state.read(path), self.device)
        return Fisher(kept["omega"], kept["per"], kept["curvature"])

    # --- streams --------------------------------------------------------------------------------------------------

    def _stream(self, corruption: str | None, severity: int, limit: int | None, clean: bool, model: str) -> Stream:
        spec = self.request.clean_data if clean else self.request.data
        if spec is None:
            raise EataError(
                f"Clean images are needed beside {self.request.data}; name them, such as --clean imagenet:PATH."
            )
        config = self.config(model)

        def load() -> Stream:
            return eata.data.load(spec, corruption=corruption, severity=severity, limit=limit, config=config)

        from_files = spec.partition(":")[0] in ("imagenet", "imagenet-c", "imagenet-r", "folder")
        if self.folder is None or not (corruption or from_files):
            return load()
        words = [corruption or "plain", severity, limit, spec, model]
        path = self.folder / STREAMS / f"{slug(str(words[0]))}-{severity}-{digest(words)}.safetensors"
        return self._shared(path, load, math.prod(config["input_size"]))

    @staticmethod
    def _shared(path: Path, load: Callable[[], Stream], image_bytes: int) -> Stream:
        """The stream from the run's folder, where this process or another one has put it, or as it was loaded."""
        loaded: list[Stream] = []

        def make() -> None:
            stream = load()
            if stream.cached or len(stream) * image_bytes > KEPT_BYTES:
                loaded.append(stream)
                return
            try:
                keep(stream, path)
            except OSError as problem:
                if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                loaded.append(stream)

        once(path, make)
        return loaded[0] if loaded else KeptStream(path)

    def clear(self) -> None:
        """Let go of the decoded images; whoever needs them again makes them again."""
        for path in (self.folder / STREAMS).glob("*") if self.folder else ():
            with contextlib.suppress(OSError):  # another process of the run may hold it, on Windows
                path.unlink()
        if self.folder:
            with contextlib.suppress(OSError):
                (self.folder / STREAMS).rmdir()

    def clean(self, name: str, limit: int | None) -> Stream:
        """The clean images, as the network wants them."""
        return self.stream(None, 0, limit, True, name)

    def batches(
        self, stream: Stream, model: str, batch: int, seed: int, order: NDArray[np.int64] | None = None
    ) -> Batches:
        """The stream's batches, as the network wants them; in an order of one's own, if given."""
        config = self.config(model)
        return stream.batches(batch, seed=seed, order=order, mean=config["mean"], std=config["std"])

    def example(self, name: str) -> Stream:
        """A stream of the request's data, for what all of them have in common."""
        kind = self.request.data.partition(":")[0]
        corruption = CORRUPTIONS[0] if kind == "imagenet-c" else None
        severity = (self.request.severities or (5,))[0]
        config = self.config(name)
        stream = self._example(corruption, severity, name)
        if not stream.class_names:
            raise EataError(
                f"{self.request.data} has no labels to measure with: sort its images into a folder a class, or see "
                "'eata predict', which needs none."
            )
        stream.require(config["num_classes"])
        return stream

    @lru_cache(maxsize=4)  # noqa: B019 (lives as long as the run does)
    def _example(self, corruption: str | None, severity: int, name: str) -> Stream:
        # not from the run's folder: nothing of it is decoded
        return eata.data.load(
            self.request.data, corruption=corruption, severity=severity, limit=None, config=self.config(name)
        )

    # --- what the run's record says of them -----------------------------------------------------------------------

    def available(self, name: str) -> int:
        """Images in a stream; raises if the model does not fit the data."""
        return len(self.example(name))

    def weights(self, name: str) -> str:
        """Hash of the network's weights."""
        return state.digest(self.net(name).state_dict().items())

    def facts(self, name: str) -> dict[str, Any]:
        """Of the data, for the run's manifest."""
        request = self.request
        return {
            "spec": request.data,
            "clean": request.clean_data,
            "digest": self.example(name).digest,
            "clean_digest": None if request.clean_data is None else self.clean(name, None).digest,
            "images": self.available(name),
            "normalization": {key: list(self.config(name)[key]) for key in ("mean", "std")},
            "generated": self.generated,
            "order": "shuffled once per seed (numpy RandomState), the same for every method",
        }

    @cached_property
    def generated(self) -> bool:
        """Whether the corruptions are made here instead of read from the published files."""
        kind = self.request.data.partition(":")[0]
        if kind in ("imagenet-c", "imagenet-r"):
            return False
        if kind == "cifar10-c":
            return eata.data.load(self.request.data, corruption=CORRUPTIONS[0], severity=5, limit=1).generated
        return True


def once(path: Path, make: Callable[[], None]) -> None:
    """Call ``make``, which may write ``path``, unless it is there; of several processes one does, the others wait."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            make()


class Restricted(nn.Module):
    """A network whose logits are those of some classes only (ImageNet-R: 200 of 1,000), before entropy and argmax."""

    def __init__(self, net: nn.Module, index: tuple[int, ...]) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("index", torch.tensor(index), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits[:, self.index]  # type: ignore[index]
