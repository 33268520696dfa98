"""A limit on what one client may have in a step."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-9  # 0.29 of 100 samples are 29, although 0.29 * 100 is less


def held_back(clients: Sequence[str], limit: float) -> NDArray[np.bool_]:
    """Which samples are predicted only, so that of those learnt from no client has more than ``limit``.

    Args:
        clients: whose each sample is.
        limit: share of one client, above 0; 1 is none. Below 1, one client alone teaches nothing.

    >>> held_back(["a", "a", "a", "b"], 0.5).tolist()
    [False, True, True, False]
    >>> held_back(["a", "a"], 0.5).tolist()
    [True, True]
    """
    counts = Counter(clients)
    total = len(clients)
    while True:  # a smaller total allows each client less, until nothing changes
        allowed = int(limit * total + ROUNDING)
        smaller = sum(min(count, allowed) for count in counts.values())
        if smaller == total:
            break
        total = smaller
    held = np.zeros(len(clients), bool)
    taken: Counter[str] = Counter()
    for place, client in enumerate(clients):
        held[place] = taken[client] >= allowed
        taken[client] += 1
    return held


def largest(clients: Sequence[str]) -> float:
    """The largest share of one client.

    >>> largest(["a", "a", "a", "b"])
    0.75
    """
    return max(Counter(clients).values()) / len(clients) if clients else 0.0


def identity(address: str) -> str:
    """Whom an address belongs to: an IPv6 client has the whole of its /64 to choose from.

    >>> identity("2001:db8::1") == identity("2001:db8::2"), identity("127.0.0.1")
    (True, '127.0.0.1')
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)
