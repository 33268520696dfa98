"""Measure the independent reference once; its figures are the test data in ``imagecorruptions.json``.

python -m venv /tmp/reference
PIP_CONSTRAINT=constraints.txt /tmp/reference/bin/pip install imagecorruptions-imaug scikit-learn
/tmp/reference/bin/python tests/data/reference/make.py
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

# Where chance decides the spread over images, one draw per photograph is too few for a steady figure.
DRAWS = {"impulse_noise": 32, "motion_blur": 6, "snow": 4, "frost": 6, "fog": 64, "elastic_transform": 2}


def change(image: np.ndarray, name: str, severity: int, seed: int) -> float:
    """Mean absolute change of one image, in grey levels."""
    from imagecorruptions import corrupt  # not there when the tests are collected

    np.random.seed(seed)
    seeded = {"seed": seed} if name in ("impulse_noise", "glass_blur") else {}
    corrupted = corrupt(image, severity, corruption_name=name, **seeded)
    return float(np.abs(corrupted.astype(float) - image.astype(float)).mean())


def main() -> None:
    """Write, per corruption and severity, the mean and the standard deviation of the change over the photographs."""
    from imagecorruptions import get_corruption_names
    from inputs import photographs

    images = photographs()
    figures: dict[str, object] = {}
    for name in get_corruption_names():
        cells = []
        for severity in range(1, 6):
            changes = [
                change(image, name, severity, seed=1000 * draw + i)
                for draw in range(DRAWS.get(name, 1))
                for i, image in enumerate(images)
            ]
            cells.append({"mean": round(np.mean(changes), 4), "std": round(np.std(changes), 4)})
        figures[name] = {"draws": DRAWS.get(name, 1), "severities": cells}
        print(name, cells, flush=True)
    made = {"package": f"imagecorruptions-imaug {version('imagecorruptions-imaug')}", "images": len(images)}
    text = json.dumps({**made, "figures": figures}, indent=1) + "\n"
    Path(__file__).with_name("imagecorruptions.json").write_text(text)


if __name__ == "__main__":
    main()
