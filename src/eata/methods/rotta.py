"""RoTTA (Yuan et al., CVPR 2023): slow statistics, a balanced memory, and a teacher, for correlated streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eata import functional, norm, slow, weights
from eata.bank import Item, admit
from eata.errors import InputError
from eata.gradient import Choice, GradientAdapter
from eata.inputs import Inputs, in_range
from eata.methods.per_image import OfImages
from eata.passes import Pass
from eata.slow import Kept, Slow
from eata.views import Views

if TYPE_CHECKING:
    from eata.gradient import Shared, Unpack


class RoTTA(OfImages, GradientAdapter):
    """The teacher answers, by statistics that move slowly; the student learns from a memory balanced over the classes.

    After every ``capacity`` samples, the student on a view of the memory follows the teacher on the memory itself, by
    cross-entropy, the younger a sample the more. Then the teacher follows the student. Either has BatchNorm statistics
    of its own that take in ``momentum`` of each such batch. https://arxiv.org/abs/2303.13899

    Args:
        net: an image classifier with normalization layers; ``net.pretrained_cfg`` says how its input is normalized.
        capacity: samples in the memory, and from one step to the next; the paper's 64.
        momentum: the batch's share in the slow statistics, 0 to 1; the paper's 0.05.
        keep: momentum of the teacher, 0 to 1; the paper's 0.999.
        flip: mirror half of the views; not for digits or text.
        seed: of the random numbers.
        shared: ``lr`` (0.001) and ``optimizer`` (``"adam"``) and the other arguments of ``eata.GradientAdapter`` but
            ``score`` and ``prior``.

    >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    >>> net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    >>> model = RoTTA(net, capacity=4)
    >>> model(torch.randn(8, 1, 8, 8)).shape, model.stats.steps
    (torch.Size([8, 3]), 2)
    """

    capacity: int
    momentum: float
    keep: float
    #: the memory; the teacher's values; slow statistics of both; samples since the last step
    bank: list[Item]
    teacher: dict[str, Tensor]
    teacher_statistics: Kept
    student_statistics: Kept
    since_step: int

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
        in_range("momentum", momentum, low=0.0, high=1.0)
        in_range("keep", keep, low=0.0, high=1.0)
        views, start = Views(net, flip, soften=True, seed=seed), slow.of_source(norm.batch_norm_layers(net))
        settings: Any = {"lr": 0.001, "optimizer": "adam", **shared}
        super().__init__(net, statistics=Slow(start), **settings)
        self.declare(capacity=capacity, momentum=momentum, keep=keep)
        self.use(views)
        self.remember("bank", [])
        self.remember("since_step", 0)
        self.remember("teacher", weights.copies(self.parameters))
        self.remember("teacher_statistics", start)
        self.remember("student_statistics", slow.of_source(norm.batch_norm_layers(net)))

    def checked(self, inputs: Inputs) -> Inputs:
        inputs = super().checked(inputs)
        if self.bank and self.bank[0]["image"].shape[1:] != inputs.shape[1:]:
            old = tuple(self.bank[0]["image"].shape[1:])
            raise InputError(f"The memory holds images {old}, not {tuple(inputs.shape[1:])}; resize them, or reset().")
        return inputs

    def run(self, inputs: Inputs) -> Tensor:
        with self.using(self.teacher):
            batch = self._forward_by(Slow(self.teacher_statistics), inputs)
        if self.learning:
            self.learn(batch)
        return self.answer(batch)

    def update(self, batch: Pass, choice: Choice) -> bool:
        """Let the samples into the memory one by one, and step whenever it is time."""
        labels, entropies = batch.logits.argmax(1).tolist(), functional.entropy(batch.logits).tolist()
        stepped = False
        for image, label, entropy in zip(batch.inputs.images.split(1), labels, entropies, strict=True):
            admit(self.bank, image, label, entropy, self.capacity, batch.logits.shape[1])
            self.since_step = (self.since_step + 1) % self.capacity
            if self.since_step == 0:
                stepped |= self._step()
        return stepped

    def _step(self) -> bool:
        items = sorted(self.bank, key=lambda item: int(item["label"]))
        images = Inputs(torch.cat([item["image"] for item in items]))
        age = images.first.new_tensor([item["age"] / self.capacity for item in items])
        of_teacher, of_student = (Slow(s, self.momentum) for s in (self.teacher_statistics, self.student_statistics))
        view = images.with_images(self.views(images.first))
        with self.using(self.teacher):
            target = self._forward_by(of_teacher, images).logits
        student = self._forward_by(of_student, view, grad=True)
        student.notes["target"] = target
        choice = Choice(torch.arange(len(items), device=age.device), torch.sigmoid(-age), len(items))
        if not self.step(self.gradients(student, choice), len(items)):
            return False
        of_teacher.keep()
        of_student.keep()
        weights.follow(self.teacher, self.parameters, 1 - self.keep)
        return True

    def loss(self, logits: Tensor, batch: Pass, choice: Choice) -> Tensor:
        losses = functional.cross_entropy(logits, batch.notes["target"][choice.index])
        return (choice.weight * losses).sum() / choice.count

    def _forward_by(self, statistics: Slow, inputs: Inputs, grad: bool = False) -> Pass:
        self.statistics = statistics
        return self.forward(inputs, grad=grad)

    def snapshot(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The teacher with its statistics as they stand, as an independent net; no batch is needed."""
        with self.lock, self.using(self.teacher):
            return norm.with_statistics(self.net, {i: (m, v) for i, (m, v) in enumerate(self.teacher_statistics)})

    def unfit_for_window(self, exact: bool) -> str | None:
        return "eata.RoTTA keeps a memory and statistics of its own and takes single samples; leave the window out."
