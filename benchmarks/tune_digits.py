"""Choose the preset ``digits`` on corrupted copies of the training digits; the test images are never looked at.

Run: python -m benchmarks.tune_digits

One value after another, the others at their best so far: the learning rate and epsilon by ETA's mean error (reset
before each corruption), beta by EATA's mean error plus its clean error at the end of one lifelong stream. E0 and alpha
are the paper's.
"""

from __future__ import annotations

import copy

import eata

FISHER = 896  # all training images: fewer than the paper's 2,000, more than the 300 that are enough
CONFIG = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
START = {"lr": 0.02, "e0": 0.4, "epsilon": 0.4, "alpha": 0.1}
SHIFTS = eata.data.CORRUPTIONS[::3]  # one of each kind at least, and a third of the time
RATES = (0.005, 0.02, 0.05, 0.1)
EPSILONS = (0.2, 0.4, 0.6)
BETAS = (1.0, 100.0, 10000.0)


def error(adapter: eata.Adapter, stream: eata.data.Stream) -> float:
    correct = sum(int((adapter(x).argmax(1) == y).sum()) for x, y in stream.batches(64, **CONFIG))
    return 100 - 100 * correct / len(stream)


def main() -> None:
    net = eata.models.load("resnet26-bn-digits")
    shifts = [eata.data.load("digits", split="train", corruption=name, limit=896) for name in SHIFTS]
    clean = eata.data.load("digits", split="train", limit=896)  # whole batches of 64
    print(f"source: {sum(error(eata.Source(copy.deepcopy(net)), shift) for shift in shifts) / len(shifts):.2f} %")

    def reset(**values: float) -> float:
        total = 0.0
        for shift in shifts:
            total += error(eata.ETA(copy.deepcopy(net), **values), shift)
        return total / len(shifts)

    chosen = dict(START)
    for name, candidates in (("lr", RATES), ("epsilon", EPSILONS)):
        errors: dict[float, float] = {}
        for value in candidates:
            errors[value] = reset(**chosen | {name: value})
            print(f"{name} {value:g}: {errors[value]:.2f} %", flush=True)
        chosen[name] = min(errors, key=errors.__getitem__)

    fisher = eata.fisher(copy.deepcopy(net), clean.batches(64, **CONFIG), samples=FISHER, per="batch")
    sums = {}
    for beta in BETAS:
        model = eata.EATA(copy.deepcopy(net), fisher, beta=beta, **chosen)
        mean = sum(error(model, shift) for shift in shifts) / len(shifts)
        after = error(model, clean)
        sums[beta] = mean + after
        print(f"beta {beta:g}: lifelong {mean:.2f} %, clean after {after:.2f} %", flush=True)
    print(chosen | {"beta": min(sums, key=sums.__getitem__)})


if __name__ == "__main__":
    main()
