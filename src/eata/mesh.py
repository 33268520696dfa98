"""Small messages between the processes of one machine, over sockets of their own.

A step under BatchNorm waits for dozens of small messages. In gloo each of them passes through several threads, which
have to be woken one after the other: for a small net that takes as long as its own work.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

LARGEST = 2**16  # bytes of a message; more may not fit into what the system keeps for a socket, and all would wait
MOMENT = 2e-4  # seconds in which to look again and again: to be woken by the system takes as long
KIND = struct.Struct("I")  # goes before each message, and tells what it is
HELLO = struct.Struct("qq")  # the secret of the one who is called, and the rank of the caller
HELLO_SECONDS = 2.0  # that a caller may take to say it

Gather = Callable[[Sequence[int]], list[list[int]]]


class Mesh:
    """A socket to every other process.

    Args:
        rank: of this process.
        sockets: to each of the others, by rank.

    Attributes:
        sent: bytes that this process has sent.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self._rank, self._sockets = rank, dict(sorted(sockets.items()))
        self.sent = 0
        weakref.finalize(self, _close, list(sockets.values()))

    def exchange(self, own: Tensor) -> list[Tensor]:
        """The tensor of every process, by rank; all have the same shape and type, and are of the CPU."""
        # A process that failed in the middle of a batch, and begins another, must not be taken for one that goes on.
        kind = KIND.pack(zlib.crc32(str((own.dtype, own.shape)).encode()))
        message = kind + _bytes(own)
        for other in self._sockets.values():
            other.sendall(message)
            self.sent += len(message)
        found = [own if rank == self._rank else torch.empty_like(own) for rank in range(len(self._sockets) + 1)]
        for rank, other in self._sockets.items():
            if _receive(other, memoryview(bytearray(KIND.size))) != kind:
                raise ConnectionError(f"process {rank} is elsewhere in its batch")
            _receive(other, _bytes(found[rank]))
        return found


def connect(rank: int, size: int, timeout: float, gather: Gather) -> Mesh | None:
    """A mesh of all processes, each of which calls this; None, in each, where they can't reach one another that way.

    Args:
        rank: of this process.
        size: how many there are.
        timeout: seconds to wait in each exchange.
        gather: the numbers of every process, by rank.
    """
    if size < 2:
        return None
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server, port, secret, machine = None, 0, secrets.randbits(63), _machine()
        with contextlib.suppress(OSError):  # no loopback, say
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=size))
            port = server.getsockname()[1]
        told = gather([machine, port, secret])
        reached = all(row[0] == machine and row[1] for row in told)
        try:
            for other in range(rank) if reached else ():
                sockets[other] = socket.create_connection(("127.0.0.1", told[other][1]), timeout)
                sockets[other].sendall(HELLO.pack(told[other][2], rank))
        except OSError:  # containers of one name, say
            reached = False
        if all(row[0] for row in gather([reached])) and server is not None:
            _accept(server, sockets, size - 1, secret, timeout)
        if not all(row[0] for row in gather([len(sockets) == size - 1])):
            _close(sockets.values())
            return None
    for one in sockets.values():
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LARGEST)
    return Mesh(rank, sockets)


def _machine() -> int:
    """The same number in all processes of a machine, and another one elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # Linux
    name = boot.read_text() if boot.exists() else f"{socket.gethostname()} {uuid.getnode()}"
    return zlib.crc32(name.encode())


def _accept(server: socket.socket, sockets: dict[int, socket.socket], number: int, secret: int, timeout: float) -> None:
    """Take in those who call, until there are so many, or until time is up; they have said hello already."""
    until = time.monotonic() + timeout
    while len(sockets) < number and (left := until - time.monotonic()) > 0:
        server.settimeout(left)
        with contextlib.suppress(OSError):
            caller, _ = server.accept()
            try:
                caller.settimeout(min(HELLO_SECONDS, timeout))
                known, other = HELLO.unpack(_receive(caller, memoryview(bytearray(HELLO.size))))
            except OSError:  # a stranger who hung up, or says nothing
                known = None
            if known == secret:
                caller.settimeout(timeout)
                sockets[other] = caller
            else:
                caller.close()


def _bytes(t: Tensor) -> memoryview:
    return t.view(-1).view(torch.uint8).numpy().data


def _receive(of: socket.socket, target: memoryview) -> memoryview:
    """The target, filled."""
    rest, timeout, until = target, of.gettimeout(), time.perf_counter() + MOMENT
    of.setblocking(False)
    while rest:
        try:
            count = of.recv_into(rest)
        except BlockingIOError:
            if time.perf_counter() > until:
                of.settimeout(timeout)
            continue
        if not count:
            raise ConnectionError("the connection was closed")
        rest = rest[count:]
    of.settimeout(timeout)
    return target


def _close(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()
