"""A request that is not answered: why, and with which HTTP status."""

from __future__ import annotations

from collections.abc import Mapping

from eata.errors import EataError


class Refusal(EataError):  # noqa: N818 (it is an answer, and no error of the server)
    """A request was refused before anything moved; the text says why.

    Args:
        status: of HTTP, such as 400.
        text: one sentence for the client.
        headers: of the answer, such as ``Retry-After``.

    >>> Refusal(404, "There is no model 'x'.").status
    404
    """

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = dict(headers or {})
