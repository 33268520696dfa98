"""RoTTA (Yuan et al., CVPR 2023): slow statistics, a balanced memory, and a teacher, for correlated streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eata import functional, norm
from eata.bank import Item, admit, same_size
from eata.errors import EataError
from eata.gradient import Choice
from eata.inputs import Inputs, in_range
from eata.methods.taught import Taught
from eata.passes import Pass
from eata.slow import Kept, Slow, of_source

if TYPE_CHECKING:
    from eata.gradient import Shared, Unpack


class RoTTA(Taught):
    """The teacher answers, by statistics that move slowly; the student learns from a memory balanced over the classes.

    After every ``capacity`` samples, the student on a view of the memory follows the teacher on the memory itself, the
    younger a sample the more, and then the teacher the student; statistics of each take in ``momentum`` of the batch.
    https://arxiv.org/abs/2303.13899

    Args:
        net: an image classifier with normalization layers; ``net.pretrained_cfg`` says how its input is normalized.
        capacity: samples in the memory, and from one step to the next; the paper's 64.
        momentum: the batch's share in the slow statistics, 0 to 1; the paper's 0.05.
        keep: momentum of the teacher, 0 to 1; the paper's 0.999.
        flip: mirror half of the views; not for digits or text.
        seed: of the random numbers.
        shared: ``lr`` (0.001), ``optimizer`` (``"adam"``), others of ``eata.GradientAdapter`` but ``score``, ``prior``.

    >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    >>> net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    >>> model = RoTTA(net, capacity=4)
    >>> model(torch.randn(8, 1, 8, 8)).shape, model.stats.steps
    (torch.Size([8, 3]), 2)
    """

    capacity: int
    momentum: float
    keep: float
    bank: list[Item]  #: the memory
    since_step: int  #: samples
    teacher_statistics: Kept
    student_statistics: Kept

    def __init__(
        self,
        net: nn.Module,
        *,
        capacity: int = 64,
        momentum: float = 0.05,
        keep: float = 0.999,
        flip: bool = True,
        seed: int = 0,
        **shared: Unpack[Shared],
    ) -> None:
        in_range("capacity", capacity, low=1)
        for name, value in (("momentum", momentum), ("keep", keep)):
            in_range(name, value, low=0.0, high=1.0)
        if "prior" in shared:
            raise EataError(f"eata.RoTTA keeps statistics of its own; leave prior={shared['prior']!r} out.")
        layers = norm.batch_norm_layers(net)
        super().__init__(net, flip=flip, seed=seed, statistics=Slow(of_source(layers)), **shared)
        self.declare(capacity=capacity, momentum=momentum, keep=keep)
        own = {f"{who}_statistics": of_source(layers) for who in ("teacher", "student")}
        for name, first in {"bank": [], "since_step": 0, **own}.items():
            self.remember(name, first)

    def checked(self, inputs: Inputs) -> Inputs:
        return same_size(super().checked(inputs), self.bank)

    def run(self, inputs: Inputs) -> Tensor:
        with self.using(self.teacher):
            batch = self._forward_by(Slow(self.teacher_statistics), inputs)
        if self.learning:
            self.learn(batch)
        return batch.logits

    def update(self, batch: Pass, choice: Choice) -> bool:
        """Let the samples into the memory one by one, and step whenever it is time."""
        labels, entropies, stepped = batch.logits.argmax(1).tolist(), functional.entropy(batch.logits).tolist(), False
        for image, label, entropy in zip(batch.inputs.images.split(1), labels, entropies, strict=True):
            admit(self.bank, image, label, entropy, self.capacity, batch.logits.shape[1])
            self.since_step = (self.since_step + 1) % self.capacity
            stepped |= self.since_step == 0 and self._step()
        return stepped

    def _step(self) -> bool:
        items = sorted(self.bank, key=lambda item: int(item["label"]))
        images = Inputs(torch.cat([item["image"] for item in items]))
        age = images.first.new_tensor([item["age"] / self.capacity for item in items])
        of_teacher, of_student = (Slow(s, self.momentum) for s in (self.teacher_statistics, self.student_statistics))
        with self.using(self.teacher):
            target = self._forward_by(of_teacher, images).logits
        student = self._forward_by(of_student, Inputs(self.views(images.first)), grad=True)
        student.notes["target"] = target
        choice = Choice(torch.arange(len(items), device=age.device), torch.sigmoid(-age), len(items))
        stepped = self.step(self.gradients(student, choice), len(items))
        if stepped:
            of_teacher.keep()
            of_student.keep()
            self.follow(1 - self.keep)
        return stepped

    def _forward_by(self, statistics: Slow, inputs: Inputs, grad: bool = False) -> Pass:
        self.statistics = statistics
        return self.forward(inputs, grad=grad)

    def snapshot(self, *args: Any, **kwargs: Any) -> nn.Module:
        with self.lock, self.using(self.teacher):
            return norm.with_statistics(self.net, {i: (m, v) for i, (m, v) in enumerate(self.teacher_statistics)})

    def unfit_for_window(self, exact: bool) -> str | None:
        return "eata.RoTTA keeps a memory and statistics of its own and takes single samples; leave the window out."
