"""Windows and macOS lack some modules of Linux: everything imports, and a bench runs, without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HIDE = """
import sys
import torch  # on Linux it uses what Linux has; on Windows it does without
for name in [name for name in sys.modules if name.partition(".")[0] == "filelock"]:
    del sys.modules[name]
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None
import os, mmap, signal
for module, names in ((os, ("sched_getaffinity", "fork", "getuid", "geteuid", "posix_fadvise", "nice")),
                      (mmap, ("MAP_PRIVATE", "MAP_ANONYMOUS")), (signal, ("SIGKILL", "SIGHUP", "SIGALRM"))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""

IMPORT = """
import importlib, pkgutil, eata
for found in pkgutil.walk_packages(eata.__path__, "eata."):
    if not found.name.startswith("eata.serve"):
        importlib.import_module(found.name)
"""

BENCH = """
import warnings
warnings.simplefilter("ignore")  # filelock says that it takes its slower kind of lock
sys.argv = ["eata", "bench", "components", "--data", "digits", "--limit", "32", "--methods", "s=1", "--severity", "5"]
sys.argv += ["--workers", "1"]
from eata.cli import main
main()
"""


@pytest.mark.parametrize("program", [IMPORT, BENCH], ids=["import", "bench"])
def test_without_the_modules_of_posix(tmp_path: Path, program: str) -> None:
    done = subprocess.run([sys.executable, "-c", HIDE + program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
