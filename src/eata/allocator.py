"""Memory of the process. For commands only: a library leaves its host's allocator alone."""

from __future__ import annotations

import ctypes

M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # from glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory in the process instead of handing it back to the system.

    By default a large tensor gets fresh pages from the system each time, and the first touch of each page costs more
    than the arithmetic of an elementwise operation.

    Returns:
        Whether it could be done; on a system without glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
