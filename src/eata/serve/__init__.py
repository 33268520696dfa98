"""The adaptive endpoint: ``eata.serve.app(model)``, an ASGI app, and the command ``eata serve``. Needs eata[serve]."""

from __future__ import annotations

from eata.errors import EataError

try:
    from eata.serve.asgi import app
except ImportError as problem:
    raise EataError(f"Serving needs {problem.name}: pip install 'eata[serve]'.") from None

__all__ = ["app"]
