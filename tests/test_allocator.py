"""Fresh memory, page by page: counted in processes of their own, since the setting is the process's."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
