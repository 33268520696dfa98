"""No client has more of a step than its share, and nobody is held back without need."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from eata.serve.share import held_back


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), st.integers(5, 100))
def test_shares_hold_and_are_used_up(clients, percent):
    held = held_back(clients, percent / 100)
    taught = Counter(client for client, out in zip(clients, held, strict=True) if not out)
    total = sum(taught.values())
    assert all(100 * count <= percent * total for count in taught.values())
    # naive, in whole numbers: the largest total that any choice of counts within the limit can reach
    counts = Counter(clients)
    reach = [sum(min(n, percent * size // 100) for n in counts.values()) for size in range(len(clients) + 1)]
    assert total == max(size for size, reached in enumerate(reach) if reached >= size)
