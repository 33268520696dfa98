"""The command line: one file per command, each a plain function that ``main`` registers."""

from __future__ import annotations

import errno
import sys

import typer

from eata import allocator
from eata.cli import bench, corrupt, data, demo, predict, report, serve, train
from eata.cli.screen import console
from eata.errors import EataError

app = typer.Typer(
    name="eata",
    help="Keep a trained PyTorch classifier accurate while the world shifts under it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data.app, name="data")
app.command()(demo.demo)
app.command()(predict.predict)
app.command()(bench.bench)
app.command()(report.report)
app.command()(corrupt.corrupt)
app.command()(train.train)
app.command()(serve.serve)


def _sentence(problem: EataError | OSError) -> str:
    """What went wrong, in words instead of the system's numbers."""
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "The disk is full; what was finished is kept. Make room, and give the same command again "
            "(predict and train: with --resume)."
        )
    if isinstance(problem, (FileExistsError, NotADirectoryError)) and problem.filename:
        return f"{problem.filename} can't be made: a part of this path is a file, not a folder."
    if isinstance(problem, OSError) and problem.strerror and problem.filename:
        return f"{problem.filename}: {problem.strerror}."
    return str(problem)


def main() -> None:
    """Run the command line; what the user can mend is said in one sentence, with exit code 2."""
    allocator.keep_freed_memory()
    try:
        app()
    except (EataError, OSError) as problem:
        console(errors=True).print(f"eata: {_sentence(problem)}", style="bold red")
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != 130:  # typer makes this of Ctrl-C
            raise
        console(errors=True).print("eata: stopped; what was finished is kept.")
        sys.exit(130)
