"""Labelled image streams and the 15 corruptions."""

from eata.data.corruptions import CORRUPTIONS, corrupt
from eata.data.sets import SPECS, load
from eata.data.stream import Stream

__all__ = ["CORRUPTIONS", "SPECS", "Stream", "corrupt", "load"]
