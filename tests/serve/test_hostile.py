"""A few hundred of the hostile requests; `python -m benchmarks.serve hostile` sends ten thousand."""

from __future__ import annotations

import pytest
from benchmarks.serve_hostile import attack

pytest.importorskip("schemathesis")


def test_no_request_breaks_the_server_and_no_refused_one_moves_a_weight():
    witness = attack(requests=500, seed=1)
    assert witness.problems == []
    refused = sum(count for status, count in witness.statuses.items() if 400 <= status < 500)
    assert witness.statuses[200] > 20  # it is open for those who behave
    assert refused > 200
