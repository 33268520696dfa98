"""Memory of one adaptation step on ResNet-50, 224x224: stock PyTorch, ours, and ours with lean=True.

    python -m benchmarks.memory              # B = 64; needs about 12 GB for the stock side
    python -m benchmarks.memory --batch 16 --out results/speed-memory

Each side runs in a process of its own. Saved activations: what autograd keeps between forward and backward, each memory
block once, parameters left out. Peak: the most that the process ever held, less what it held before the step. The
gradient of each, all rows chosen, is compared with that of the line above. Between stock and ours lies the rounding of
another memory layout only, which this deep net of random weights magnifies; the last line is what lean=True changes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record, textbook
from benchmarks.nets import resnet50
from eata import rows
from eata.inputs import Inputs
from eata.norm import Statistics
from eata.passes import Runner

SIDES = ("stock", "ours", "ours, lean")


def held() -> int:
    """Most bytes of memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def saved_bytes(net: nn.Module, seen: dict[int, Tensor]) -> int:
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    return sum(t.untyped_storage().nbytes() for at, t in seen.items() if at not in own)


def run(side: str, batch: int, hooks: bool) -> dict[str, object]:
    """One side, in this process; ``hooks`` counts what is saved, and holds it: the peak is then not the true one."""
    torch.manual_seed(0)
    net = resnet50()
    parameters = textbook.configure(net)
    x = torch.randn(batch, 3, 224, 224)
    before = held()
    seen: dict[int, Tensor] = {}
    ours = Runner(net, rows.Engine(lean=side == "ours, lean"))

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t
        return t

    def forward() -> Any:
        return net(x) if side == "stock" else ours(Inputs(x), Statistics(prior=0), parameters)

    if hooks:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            made = forward()
        del made
        return {"saved": saved_bytes(net, seen)}
    made, index = forward(), torch.arange(batch)
    if side == "stock":
        gradients = torch.autograd.grad(textbook.entropy(made[index]).mean(), parameters)
    else:
        gradients = made.gradients(index, lambda z: textbook.entropy(z).mean())
    flat = torch.cat([g.flatten() for g in gradients if g is not None])
    return {"peak": held() - before, "gradient": flat.tolist()}


def in_its_own_process(side: str, batch: int, what: str) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.memory", "--batch", str(batch), "--side", side, "--what", what]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="B (default 64)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=("saved", "peak"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the numbers there, as results/speed-NAME")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(run(arguments.side, arguments.batch, arguments.what == "saved")))
        return
    made = record.manifest()
    found = measure(arguments.batch)
    print(table(found))
    record.keep_folder(arguments.out, made, found, [table(found)])


def measure(batch: int) -> dict[str, Any]:
    """Bytes of each side, and how far its gradient is from that of the side before."""
    found: dict[str, dict[str, float]] = {}
    reference = None
    for side in SIDES:
        saved = float(str(in_its_own_process(side, batch, "saved")["saved"]))
        seen = in_its_own_process(side, batch, "peak")
        gradient = torch.tensor(seen["gradient"])
        reference = gradient if reference is None else reference
        differs = float((gradient - reference).norm() / reference.norm())
        found[side] = {"saved": saved, "peak": float(str(seen["peak"])), "differs": differs}
        reference = gradient
    return {"batch": batch, "sides": found}


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"ResNet-50, 224x224, B = {found['batch']}",
        "",
        "| | saved activations | of stock | peak | of stock | gradient differs from the line above by |",
        "|---|---|---|---|---|---|",
    ]
    stock = found["sides"]["stock"]
    for side, one in found["sides"].items():
        sizes = [f"{one[kind] / 2**20:.0f} MB | {one[kind] / stock[kind]:.2f}" for kind in ("saved", "peak")]
        lines.append(f"| {side} | {' | '.join(sizes)} | {100 * one['differs']:.2g} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
