"""``python -m eata``, and the command ``eata``."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line, or a word on how to get it: its packages are an extra."""
    try:
        from eata.cli import main as command
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] == "eata":
            raise
        sys.exit(f"eata: the commands need the package {problem.name}: pip install 'eata[bench]'.")
    command()


if __name__ == "__main__":
    main()
