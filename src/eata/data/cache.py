"""Where data sets are kept between runs, and arrays in it that are whole or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eata.errors import EataError
from eata.files import replacing


def folder() -> Path:
    """The cache folder: ``$EATA_DATA``, else ``eata`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.

    >>> folder().is_absolute()
    True
    """
    chosen = os.environ.get("EATA_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "eata"


def save(path: Path, array: NDArray[Any]) -> None:
    """Write ``array`` as a .npy file that is whole or absent."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            np.save(file, array, allow_pickle=False)
        except OSError as problem:
            if problem.errno is not None:
                raise
            # numpy's own word for a write that was cut short
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None


def load(path: Path, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Map a .npy file that must hold an array of this shape and type; an ``EataError`` says what else it holds.

    Processes that map the same file share its memory; what one writes into its array, it alone sees.
    """
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError) as problem:
        raise EataError(f"{path} is damaged ({problem}); remove it and fetch or make it again.") from None
    if array.shape != shape or array.dtype != dtype:
        raise EataError(
            f"{path} holds {array.dtype} {array.shape}, not {dtype} {shape}; remove it and fetch or make it again."
        )
    return array
