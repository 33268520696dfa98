"""Fresh memory, page by page: counted in processes of their own, since the allocator is the process's."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from eata import allocator

TOUCH_AND_FREE = """
import resource, torch
from eata import allocator
{setting}
torch.ones(16_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(16_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(setting: str) -> int:
    command = [sys.executable, "-c", TOUCH_AND_FREE.format(setting=setting)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's, and this is another C library")
def test_freed_memory_is_used_again() -> None:
    assert faults("assert allocator.keep_freed_memory()") < 0.2 * faults("pass")


POOLS = """
import threading, torch
from eata import allocator
{setting}
places = []
thread = threading.Thread(target=lambda: places.append(torch.empty(1_000_000).data_ptr()))
thread.start()
thread.join()
[pool] = [line.split()[0].split("-") for line in open("/proc/self/maps") if "[heap]" in line]
print(int(pool[0], 16) <= places[0] < int(pool[1], 16))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's, and this is another C library")
def test_threads_share_the_main_threads_pool() -> None:
    def shared(setting: str) -> bool:
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "33554432"}
        command = [sys.executable, "-c", POOLS.format(setting=setting)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
        return printed.split()[-1] == "True"

    assert shared("assert allocator.keep_freed_memory()")
    assert not shared("pass")  # otherwise there would be nothing to mend


RESIDENT = """
import resource, torch
from eata import allocator
def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
torch.ones(1)
before = held()
blocks, pins = [], []
for _ in range(40):  # 8 MB each, and between them something small that stays
    blocks.append({make}.fill_(1))
    pins.append(torch.ones(40_000))
full = held() - before
blocks.clear()
{after}
print(full, held() - before)
"""


def resident(make: str, after: str = "pass") -> tuple[float, float]:
    """MB held while the blocks live, and when they are freed."""
    # The threshold is where it gets by itself once large tensors were freed.
    setting = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "33554432"}
    command = [sys.executable, "-c", RESIDENT.format(make=make, after=after)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=setting).stdout.split()
    return float(printed[0]), float(printed[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how memory is kept is glibc's affair")
def test_blocks_and_gaps_go_back_to_the_system() -> None:
    stock = "torch.empty(2_000_000)"
    full, freed = resident(stock)
    assert full > 280
    assert freed > 200  # otherwise there would be nothing to mend
    assert resident("allocator.block_like(torch.empty(2_000_000, device='cpu'), torch.float32)")[1] < 100
    assert resident(stock, "allocator.give_back()")[1] < 100


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, torch.int32])
@pytest.mark.parametrize("size", [4, 256])  # small ones come from the usual place
def test_a_block_has_the_shape_and_layout(layout: torch.memory_format, dtype: torch.dtype, size: int) -> None:
    like = torch.zeros(3, 8, size, size).contiguous(memory_format=layout)
    block = allocator.block_like(like, dtype)
    assert (block.shape, block.stride(), block.dtype) == (like.shape, like.stride(), dtype)
    values = (torch.arange(like.numel()) % 2).view(like.shape)
    assert torch.equal(block.copy_(values).long(), values)
