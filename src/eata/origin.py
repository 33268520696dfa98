"""Which code made a result."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


@cache
def commit() -> str:
    """The commit of the source that runs, with ``-dirty`` where files differ from it; empty for an installed copy."""
    here = Path(__file__)
    try:
        # an installed copy may lie in somebody else's repository
        _git("ls-files", "--error-unmatch", here.name)
        return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return done.stdout.strip()
