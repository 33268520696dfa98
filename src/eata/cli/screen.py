"""What commands print: plain text, so that a path with brackets in it stays what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, errors: bool = False) -> Console:
    """The terminal; words in brackets are no markup, and numbers get no colours."""
    from rich.console import Console

    return Console(stderr=errors, markup=False, highlight=False, soft_wrap=True)
