"""MEMO (Zhang et al. 2021): make the copies of one image agree, and be sure."""

from __future__ import annotations

from torch import Tensor, nn

from eata import functional
from eata.gradient import Choice, GradientAdapter, MakeOptimizer
from eata.inputs import Inputs, in_range
from eata.methods.per_image import PerImage
from eata.norm import Statistics
from eata.passes import Pass


class MEMO(PerImage, GradientAdapter):
    """For each image: one step of all parameters on the entropy of the mean prediction over AugMix copies; predict;
    restore. Nothing is carried over from image to image.

    BatchNorm uses N/(N+1) * source + 1/(N+1) * batch statistics: the copies count as the one image that they are.

    Args:
        net: an image classifier; ``net.pretrained_cfg`` says how its input is normalized.
        copies: AugMix copies of each image; the paper's 32 (CIFAR-10), 64 for ImageNet.
        lr: learning rate; the paper's 0.005 (CIFAR-10), 0.00025 for ImageNet.
        prior: N, how many samples the source statistics of BatchNorm count for; the paper's 16. Without BatchNorm it
            does not matter.
        optimizer: function from parameters to a torch optimizer, made anew for each image; default SGD.
        flip: mirror half of the copies; not for digits or text.
        seed: of the random numbers.

    >>> import eata, torch
    >>> net = eata.models.ResNet26(norm="gn")
    >>> net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    >>> model = MEMO(net, copies=4)
    >>> model(torch.zeros(2, 3, 32, 32)).shape, model.stats.forwards, model.stats.backwards
    (torch.Size([2, 10]), 10, 8)
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        copies: int = 32,
        lr: float = 0.005,
        prior: float = 16,
        optimizer: MakeOptimizer | None = None,
        flip: bool = True,
        seed: int = 0,
    ) -> None:
        in_range("prior", prior, low=0.0)
        super().__init__(
            net,
            copies=copies,
            flip=flip,
            seed=seed,
            lr=lr,
            optimizer=optimizer,
            backward="full",
            prior=prior,
            statistics=Statistics(prior, samples=1, constant=True),
        )

    def free_parameters(self, net: nn.Module, layers: int | None) -> dict[str, nn.Parameter]:
        return dict(net.named_parameters())

    def loss(self, logits: Tensor, batch: Pass, choice: Choice) -> Tensor:
        return functional.marginal_entropy(logits)

    def one(self, image: Tensor) -> Tensor:
        if not self.learning:
            return self.forward(Inputs(image[None])).logits
        try:
            copies = self.forward(Inputs(self.copies.augmix(image)), grad=True)
            self.update(copies, self.select(copies))
            return self.forward(Inputs(image[None])).logits
        finally:
            self.restore_source()
