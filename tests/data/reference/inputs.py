"""The photographs that the reference figures were measured on, rebuilt anywhere from scikit-learn's two samples."""

from __future__ import annotations

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

SIDE = 224


def photographs() -> np.ndarray:
    """24 natural 224x224 crops as uint8 (24, 224, 224, 3): two photographs, three scales, four places each."""
    crops = []
    for name in ("china.jpg", "flower.jpg"):
        photo = Image.fromarray(load_sample_image(name))
        for window in (224, 312, 420):
            right, bottom = photo.width - window, photo.height - window
            for i, (left, top) in enumerate([(0, 0), (right // 3, bottom), (2 * right // 3, 0), (right, bottom)]):
                crop = photo.crop((left, top, left + window, top + window)).resize((SIDE, SIDE), Image.Resampling.BOX)
                crops.append(np.asarray(crop)[:, ::-1] if i % 2 else np.asarray(crop))
    return np.stack(crops)
