"""Image files from strangers: decoded within bounds, or refused."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from eata.data import images
from eata.serve.contract import Contract, Floats
from eata.serve.refusal import Refusal

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")  # others have decoders that do far more than decode
MOST_PIXELS = 32_000_000  # decoded, three bytes each
THUMBNAIL = 96  # pixels


def decoded(content: bytes, name: str, contract: Contract) -> Floats:
    """One image file as a sample (1, C, H, W); raises a ``Refusal`` that names the file."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:  # known from the header, before anything is decoded
                raise Refusal(400, f"{name} has {width} x {height} pixels; at most {MOST_PIXELS:,} are decoded.")
            target = contract.target or images.Target(contract.shape[-2], contract.shape[-1])
            pixels = np.asarray(images.fit(images.to_rgb(image), target))
    except Refusal:
        raise
    except Exception as problem:  # decoders of broken files raise anything
        known = ", ".join(FORMATS)
        reason = " ".join(str(problem).replace(repr(problem), "").split())[:80] if isinstance(problem, OSError) else ""
        detail = f" ({reason})" if reason and "BytesIO" not in reason else ""
        raise Refusal(400, f"{name} can't be read as an image{detail}; send a whole {known} file.") from None
    return contract.checked(contract.normalized(pixels[None]))


def joined(samples: list[Floats]) -> Floats:
    """Samples (1, C, H, W) as one batch."""
    return np.concatenate(samples)


def softmax(logits: Floats) -> Floats:
    """Confidences (C,) of one image.

    >>> softmax(np.zeros(2, np.float32)).tolist()
    [0.5, 0.5]
    """
    powers: Floats = np.exp(logits - logits.max())
    powers /= powers.sum()
    return powers


def thumbnail(pixels: NDArray[np.uint8]) -> str:
    """Pixels (H, W, C) as the address of a small picture that needs no further request."""
    image = Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0])
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
