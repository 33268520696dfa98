"""CoTTA (Wang et al., CVPR 2022): a teacher over many views, and weights that now and then go back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eata import functional
from eata.gradient import Choice
from eata.inputs import Inputs, in_range
from eata.methods.taught import Taught
from eata.passes import Pass

if TYPE_CHECKING:
    from eata.gradient import Shared, Unpack


class CoTTA(Taught):
    """All weights follow a teacher, their own moving average; each goes back to the source by chance.

    The target is the teacher's logits; where the source is unsure of the batch (mean of its largest probability below
    ``confidence``), their mean over random views (Eq. 3, 4 of https://arxiv.org/abs/2203.13591). The student's loss is
    the cross-entropy to it (Eq. 1). After the step the teacher follows (Eq. 2), and each weight of the student is
    restored with probability ``restore`` (Eq. 5 to 7). The answer is the target; ``frozen()``, the teacher's logits.

    Args:
        net: an image classifier; ``net.pretrained_cfg`` says how its input is normalized.
        copies: views of each image; the paper's 32.
        momentum: of the teacher, 0 to 1; the paper's 0.999.
        restore: probability, 0 to 1; the paper's 0.01 (CIFAR-10), 0.001 for ImageNet.
        confidence: 0 to 1; the paper's 0.92 (CIFAR-10), 0.72 (CIFAR-100), 0.1 for ImageNet.
        flip: mirror half of the views; not for digits or text.
        seed: of the random numbers.
        shared: ``lr`` (0.001) and ``optimizer`` (``"adam"``; for ImageNet ``"sgd"`` and 0.01) and the other arguments
            of ``eata.GradientAdapter`` but ``score`` and ``layers``.

    >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    >>> net.pretrained_cfg = {"mean": (0.5,), "std": (0.5,)}
    >>> model = CoTTA(net, copies=2, confidence=1.0)
    >>> model(torch.randn(4, 1, 8, 8)).shape, model.stats.forwards, model.stats.backwards
    (torch.Size([4, 3]), 16, 4)
    """

    copies: int
    momentum: float
    restore: float
    confidence: float

    def __init__(
        self,
        net: nn.Module,
        *,
        copies: int = 32,
        momentum: float = 0.999,
        restore: float = 0.01,
        confidence: float = 0.92,
        flip: bool = True,
        seed: int = 0,
        **shared: Unpack[Shared],
    ) -> None:
        in_range("copies", copies, low=1)
        for name, value in (("momentum", momentum), ("restore", restore), ("confidence", confidence)):
            in_range(name, value, low=0.0, high=1.0)
        super().__init__(net, flip=flip, seed=seed, **shared)
        self.declare(copies=copies, momentum=momentum, restore=restore, confidence=confidence)

    def free_parameters(self, net: nn.Module, layers: int | None) -> dict[str, nn.Parameter]:
        """All of them."""
        return dict(net.named_parameters())

    def select(self, batch: Pass) -> Choice:
        """All samples, with the teacher's answer as their target."""
        batch.notes["target"] = self._target(batch.inputs)
        return super().select(batch)

    def after_step(self, batch: Pass, choice: Choice) -> None:
        """The teacher follows; then some weights are restored."""
        self.follow(1 - self.momentum)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                chance = torch.rand(parameter.shape, generator=self.views.generator).to(parameter.device)
                parameter.copy_(torch.where(chance < self.restore, self.source[name], parameter))

    def run(self, inputs: Inputs) -> Tensor:
        return super().run(inputs) if self.learning else self._by(self.teacher, inputs)

    def answer(self, batch: Pass) -> Tensor:
        """The target; the teacher's logits if none was made."""
        target: Tensor | None = batch.notes.get("target")
        return self._by(self.teacher, batch.inputs) if target is None else target

    def _by(self, values: dict[str, Tensor], inputs: Inputs) -> Tensor:
        with self.using(values):
            return self.forward(inputs).logits

    def _target(self, inputs: Inputs) -> Tensor:
        sure = functional.probabilities(self._by(self.source, inputs)).amax(1).mean()
        if sure >= self.confidence:
            return self._by(self.teacher, inputs)
        views = (Inputs(self.views(inputs.images)) for _ in range(self.copies))
        return torch.stack([self._by(self.teacher, view) for view in views]).mean(0)

    def snapshot(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The teacher, as an independent net."""
        with self.using(self.teacher):
            return super().snapshot(*args, **kwargs)

    def unfit_for_window(self, exact: bool) -> str | None:
        return (
            None if exact else "eata.CoTTA answers by its teacher on whole batches; use eata.Window(..., exact=True)."
        )
