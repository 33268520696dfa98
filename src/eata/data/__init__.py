"""Labelled image streams and the 15 corruptions."""

from eata.data.sets import SPECS, load
from eata.data.stream import Stream

__all__ = ["SPECS", "Stream", "load"]
