"""Packages beyond the core (torch, numpy, safetensors): imported when they are needed, named when they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from eata.errors import EataError


def need(module: str, what: str, extra: str) -> Any:
    """The module, imported; an ``EataError`` says which extra brings it.

    Args:
        module: to import, such as ``"PIL.Image"``.
        what: needs it, for the sentence.
        extra: of this package that brings it.

    >>> need("nowhere", "Flying", "wings")
    Traceback (most recent call last):
        ...
    eata.errors.EataError: Flying needs the package nowhere, which is not installed: pip install 'eata[wings]'.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        package = (problem.name or module).partition(".")[0]
        raise EataError(
            f"{what} needs the package {package}, which is not installed: pip install 'eata[{extra}]'."
        ) from None
