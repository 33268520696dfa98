"""How close the row-sparse gradient is to the textbook one, on a trained ResNet-26 under corruptions of CIFAR-10.

    python -m benchmarks.gradient --out results/rows-gradient
    python -m benchmarks.gradient --batches 8 fog contrast
    python -m benchmarks.gradient --weights checkpoint.safetensors    # tensors named net.*

For each corruption (severity 5) and B'/B, over some batches of 64: cosine to the textbook gradient (mean, and the worst
batch), norm over its norm, and the rows stored. The B' most confident samples of each batch are chosen, as EATA does;
the loss is EATA's weighted entropy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import eata
from benchmarks import record
from benchmarks.textbook import configure, entropy
from eata import rows
from eata.inputs import Inputs
from eata.norm import Statistics
from eata.passes import Runner

FRACTIONS = (1 / 64, 3 / 64, 0.25, 0.5, 0.75)
HALVES = ((0.5,) * 3, (0.5,) * 3)  # mean and std of the images that the ResNet-26 was trained with
CORRUPTIONS = ("gaussian_noise", "defocus_blur", "fog", "contrast", "jpeg_compression")


def loss_of(chosen: Tensor) -> Tensor:
    """EATA's, without the Fisher term (which has no rows)."""
    entropies = entropy(chosen)
    return (entropies * torch.exp(0.4 * math.log(10) - entropies.detach())).mean()


def vector(gradients: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients if g is not None])


def compare(net: nn.Module, parameters: list[nn.Parameter], x: Tensor, chosen: int) -> tuple[float, float, int]:
    """Cosine, norm ratio, and rows stored for one batch."""
    logits = net(x)
    index = entropy(logits.detach()).argsort()[:chosen].sort().values
    textbook = vector(torch.autograd.grad(loss_of(logits[index]), parameters))
    engine = rows.Engine()
    ours = vector(Runner(net, engine)(Inputs(x), Statistics(prior=0), parameters).gradients(index, loss_of))
    stored = len(x) if engine.rows is None else engine.rows.count
    return float(F.cosine_similarity(ours, textbook, 0)), float(ours.norm() / textbook.norm()), stored


def trained(weights: Path | None) -> nn.Module:
    """Our ResNet-26, or one in training: ``weights`` is its safetensors file. It sees images by ``HALVES``."""
    if weights is None:
        return eata.models.load("resnet26-bn-cifar10")
    net = eata.models.ResNet26(10, "bn")
    tensors = {k.removeprefix("net."): v for k, v in load_file(weights).items() if k.startswith("net.")}
    missing = net.load_state_dict(tensors, strict=False).missing_keys
    if missing:
        raise ValueError(f"{weights} has no 'net.{missing[0]}'.")
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corruptions", nargs="*", default=CORRUPTIONS, help=f"default: {' '.join(CORRUPTIONS)}")
    parser.add_argument("--batches", type=int, default=4, help="of 64, for each corruption (default 4)")
    parser.add_argument("--weights", type=Path, help="safetensors file of a ResNet26(10, 'bn') in training")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the numbers there, as results/rows-gradient")
    arguments = parser.parse_args()
    made = record.manifest()
    net = trained(arguments.weights)
    parameters = configure(net)
    lines = ["| corruption | B'/B | rows stored | cosine | worst batch | norm |", "|---|---:|---:|---:|---:|---:|"]
    print("\n".join(lines))
    kept = []
    for corruption in arguments.corruptions:
        stream = eata.data.load("cifar10", corruption=corruption, severity=5, limit=64 * arguments.batches)
        batches = [x for x, _ in stream.batches(64, mean=(0.5,) * 3, std=(0.5,) * 3)]
        for fraction in FRACTIONS:
            found = [compare(net, parameters, x, round(64 * fraction)) for x in batches]
            cosines, norms, stored = zip(*found, strict=True)
            kept.append(
                {"corruption": corruption, "share": fraction, "cosines": cosines, "norms": norms, "rows": stored}
            )
            lines.append(
                f"| {corruption} | {fraction:.2g} | {mean(stored):.0f} | {mean(cosines):.3f} | {min(cosines):.3f} "
                f"| {mean(norms):.2f} |"
            )
            print(lines[-1], flush=True)
    record.keep_folder(arguments.out, made, {"batches": kept}, ["\n".join(lines)])


if __name__ == "__main__":
    main()
