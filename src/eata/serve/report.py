"""What an engine tells of itself, as JSON: for operators' programs, and for the live page."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from eata.serve import watch

if TYPE_CHECKING:
    from eata.serve.engine import Engine


def adaptation(engine: Engine) -> dict[str, Any]:
    """Stats, drift, events, versions."""
    mark = engine.mark
    return {
        "model": engine.contract.name,
        "method": watch.method(engine.model),
        "version": mark.version,
        "batches": mark.batches,
        "frozen": mark.frozen,
        "stats": engine.stats,
        "drift": engine.drift,
        "lost": None if engine.loss is None else dataclasses.asdict(engine.loss),
        "versions": [dataclasses.asdict(kept) for kept in engine.versions.kept],
        "events": [dataclasses.asdict(event) for event in engine.history.events],
    }


def live(engine: Engine) -> dict[str, Any]:
    """The above, the last minutes as series, and the last images."""
    contract = engine.contract
    images = [
        {
            "image": seen.address,
            "class": contract.class_names[seen.best],
            "confidence": round(seen.confidence, 4),
            "version": seen.version,
        }
        for seen in engine.history.images
    ]
    return {
        **adaptation(engine),
        "time": time.time(),
        "classes": list(contract.class_names),
        "queue": engine.queued,
        "series": engine.history.series(),
        "images": images,
    }
