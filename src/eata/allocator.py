"""Memory of the process: to keep what was freed, which is faster, or to give it back, which is leaner."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD = -8, -4, -1  # from glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory in the process instead of handing it back to the system.

    For commands only: a library leaves its host's allocator alone.

    By default a large tensor gets fresh pages from the system each time, and the first touch of each page costs more
    than the arithmetic of an elementwise operation.

    All threads share one pool: glibc gives each its own, but a large one flows over into the main thread's, and a
    server would keep the gaps in both.

    Returns:
        Whether it could be done; on a system without glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), mallopt(M_ARENA_MAX, 1)])


LARGE = 2**20  # bytes; a block of its own costs two calls to the system


def block_like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor of the shape and layout of ``t``, in memory that the system gets back when it is freed.

    glibc keeps freed blocks of up to 32 MB for later, but larger tensors do not fit into the gaps: a third of the peak
    of a lean step on ResNet-50 was such gaps.

    >>> block_like(torch.zeros(1024, 1024), torch.float16).shape
    torch.Size([1024, 1024])
    """
    size = t.numel() * dtype.itemsize
    if t.device.type != "cpu" or size < LARGE:
        return torch.empty_like(t, dtype=dtype)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not Windows
    try:
        memory = mmap.mmap(-1, size, **private)
    except OSError:  # none left: torch says so as its callers expect
        return torch.empty_like(t, dtype=dtype)
    strides = torch.empty_like(t, device="meta").stride()  # dense, in the order of those of t
    return torch.frombuffer(memory, dtype=dtype).as_strided(t.shape, strides)


def give_back() -> None:
    """Let the system have the gaps that glibc keeps (`keep_freed_memory` or not); without glibc nothing happens."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
