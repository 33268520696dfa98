"""The memory that a step takes at its peak."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def peak(found: list[int], device: torch.device, wanted: bool) -> Iterator[None]:
    """Append to ``found`` the bytes that the block takes at its peak, beyond what is there before it, if ``wanted``.

    On CUDA the device's allocator knows; on the CPU they come from the allocator's record of what it gave and took
    back. Other devices have no such record, and nothing is appended.
    """
    if not wanted or device.type not in ("cpu", "cuda"):
        yield
    elif device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        found.append(torch.cuda.max_memory_allocated(device) - before)
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each start and stop is a line on the user's screen
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            yield
        events: Any = record.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        found.append(max(accumulate(size for _, size in changes)))
