"""Sockets between the processes of one machine; here the processes are threads."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from eata import mesh
from eata.mesh import Mesh

SECONDS = 5.0


def together(size: int, act: Callable[[int], Any]) -> list[Any]:
    """What each of the threads returns."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(act, rank) for rank in range(size)]]


def connected(size: int, timeout: float = SECONDS) -> list[Mesh | None]:
    barrier, told = threading.Barrier(size, timeout=SECONDS), [[0]] * size

    def connect(rank: int) -> Mesh | None:
        def gather(numbers: Sequence[int]) -> list[list[int]]:
            barrier.wait()
            told[rank] = list(numbers)
            barrier.wait()
            return list(told)

        return mesh.connect(rank, size, timeout, gather)

    return together(size, connect)


def meshes(size: int, timeout: float = SECONDS) -> list[Mesh]:
    found = connected(size, timeout)
    assert all(isinstance(one, Mesh) for one in found)
    return [one for one in found if one is not None]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_gets_the_tensors_of_all_by_rank(size: int) -> None:
    all_of_them = meshes(size)
    sent = []
    for dtype, shape in itertools.product((torch.float64, torch.bfloat16, torch.int64), ((2, 3), (), (0, 2), (2**12,))):
        own = [torch.full(shape, 10.0 * rank + 1).to(dtype) for rank in range(size)]
        found = together(size, lambda rank, own=own: all_of_them[rank].exchange(own[rank]))
        sent.append(own[0].nbytes + mesh.KIND.size)
        for parts in found:
            assert all(torch.equal(part, of) and part.dtype == dtype for part, of in zip(parts, own, strict=True))
    assert all(one.sent == (size - 1) * sum(sent) for one in all_of_them)


def test_the_largest_message_does_not_wait_for_the_others_to_read() -> None:
    one, *_ = meshes(3, timeout=0.5)
    with pytest.raises(TimeoutError):  # for what the others say, and not before
        one.exchange(torch.zeros(mesh.LARGEST, dtype=torch.uint8))
    assert one.sent == 2 * (mesh.LARGEST + mesh.KIND.size)


def test_one_that_is_elsewhere_in_its_batch_is_noticed() -> None:
    both = meshes(2)
    messages = [torch.zeros(7, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.float32)]

    def exchange(rank: int) -> None:
        with pytest.raises(ConnectionError, match=f"process {1 - rank} is elsewhere"):
            both[rank].exchange(messages[rank])

    together(2, exchange)


def test_one_that_ends_is_noticed_at_once() -> None:
    both = meshes(2)
    del both[1]
    with pytest.raises(ConnectionError):
        both[0].exchange(torch.zeros(2))


def test_processes_of_other_machines_get_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = itertools.count()
    monkeypatch.setattr(mesh, "_machine", lambda: next(nodes))
    assert connected(3) == [None] * 3


def test_one_that_reaches_nobody_leaves_all_without(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection
    calls = itertools.count()

    def refused(*args: Any) -> socket.socket:
        if next(calls) == 1:
            raise ConnectionRefusedError
        return connect(*args)

    monkeypatch.setattr(socket, "create_connection", refused)
    assert connected(3) == [None] * 3


def _says_something_else(stranger: socket.socket) -> None:
    stranger.sendall(mesh.HELLO.pack(1234, 1))


def _says_nothing(stranger: socket.socket) -> None:
    pass


@pytest.mark.parametrize("does", [_says_something_else, _says_nothing, socket.socket.close])
def test_a_stranger_is_not_taken_for_a_process(does: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "HELLO_SECONDS", 0.2)
    connect = socket.create_connection
    strangers = []

    def after_a_stranger(*args: Any) -> socket.socket:
        strangers.append(connect(*args))
        does(strangers[-1])
        return connect(*args)

    monkeypatch.setattr(socket, "create_connection", after_a_stranger)
    both = meshes(2)
    found = together(2, lambda rank: both[rank].exchange(torch.tensor([rank])))
    assert [[int(part) for part in parts] for parts in found] == [[0, 1]] * 2
    for stranger in strangers:
        stranger.close()


def test_without_a_loopback_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> socket.socket:
        raise OSError("no loopback here")

    monkeypatch.setattr(socket, "create_server", fails)
    assert connected(2) == [None, None]


def test_one_process_needs_none() -> None:
    assert mesh.connect(0, 1, 1.0, lambda numbers: [list(numbers)]) is None
