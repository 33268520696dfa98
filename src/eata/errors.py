"""What the user can mend has a class of its own; everything else is a bug, and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EataError(ValueError):
    """Something that the caller can mend; its text says what and how. Commands print it as one sentence."""


class InputError(EataError):
    """A batch that can't be predicted; nothing has changed, and the stream can go on with the next one."""


class StateError(EataError):
    """A state (or its file) that can't be taken over; the adapter is as it was."""


def unknown(kind: str, name: str, known: Iterable[str], more: str = "") -> EataError:
    """The error for an unknown name: the nearest known one, or all of them.

    Args:
        kind: of thing, such as ``"method"``.
        name: what was asked for.
        known: what there is.
        more: a sentence that follows.

    >>> unknown("method", "tnt", ["tent", "eata"]).args[0]
    "There is no method 'tnt'; did you mean 'tent'?"
    """
    names = list(known)
    plain = name.lower().replace(" ", "_")
    close = difflib.get_close_matches(plain, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}."
    return EataError(f"There is no {kind} {name!r}; {hint} {more}".rstrip())
