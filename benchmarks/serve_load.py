"""Servers as processes on loopback, and clients that cost little: what the benchmarks of `eata serve` share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

TOKEN = "benchmark"
NET = "resnet26-bn-cifar10"
INFER = f"/v2/models/{NET}/infer"
READY = 120  # seconds that a server may take to start


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclasses.dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str, timeout: float = 10) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            content: bytes = answer.read()
            return content

    def adaptation(self) -> dict:
        found: dict = json.loads(self.get("/v1/adaptation"))
        return found

    def wait_until_ready(self, path: str) -> Server:
        deadline = time.monotonic() + READY
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.get(path, timeout=1)
                return self
            time.sleep(0.05)

    def rss(self) -> int:
        """Bytes in memory, of the process and its children."""
        return sum(_rss(pid) for pid in _family(self.process.pid))

    def processor_time(self) -> float:
        """Seconds, of the process and its children."""
        ticks = 0
        for pid in _family(self.process.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self, number: int = signal.SIGTERM) -> str:
        family: list[int] = []
        if self.process.poll() is None:
            family = list(_family(self.process.pid))
            self.process.send_signal(number)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in family:  # LitServe's workers outlive it, and look for work all the time
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.log.read_text()


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))


def _rss(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def start(command: list[str], folder: Path, port: int) -> Server:
    log = folder / f"server-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=_environment(), stdout=output, stderr=subprocess.STDOUT)
    return Server(process, port, log)


def _environment() -> dict[str, str]:
    here = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, str(Path(here) / "src")])}


def eata_serve(folder: Path, *options: str, model: str = NET) -> Server:
    """``eata serve`` on a free port."""
    port = free_port()
    command = [sys.executable, "-c", "from eata.cli import main; main()", "serve", model]
    return start([*command, "--port", str(port), "--token", TOKEN, *options], folder, port)


def request(path: str, values: np.ndarray) -> bytes:
    """One HTTP request in the protocol's binary form, whole, to be sent again and again."""
    raw = values.astype("<f4").tobytes()
    tensor = {"name": "input", "shape": list(values.shape), "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": False}}).encode()
    return http(path, head + raw, f"Inference-Header-Content-Length: {len(head)}\r\n")


def http(path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{headers}"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclasses.dataclass
class Load:
    """What clients saw: seconds of each answered request, and the answers that were not 200."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    bodies: deque[bytes] = dataclasses.field(default_factory=lambda: deque(maxlen=100_000))
    lost: int = 0

    def percentile(self, share: float) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]


class Client(asyncio.Protocol):
    """One connection that sends a request, waits for its answer, and is then idle."""

    def __init__(self, load: Load, idle: asyncio.Queue[Client], keep: bool) -> None:
        self._load, self._idle, self._keep = load, idle, keep
        self._data, self._need, self._since = b"", 0, 0.0
        self.gone = self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._idle.put_nowait(self)

    def send(self, content: bytes, since: float) -> None:
        self._data, self._need, self._since = b"", 0, since
        self._transport.write(content)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._need:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._data[:end].lower()
            at = head.index(b"content-length:") + 15
            self._need = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
        if len(self._data) < self._need:
            return
        if self._data[9:12] == b"200":
            self._load.seconds.append(time.perf_counter() - self._since)
        else:
            self._load.errors.append(self._data[: self._need].decode(errors="replace"))
        if self._keep:
            self._load.bodies.append(self._data[self._data.index(b"\r\n\r\n") + 4 :])
        self._idle.put_nowait(self)

    def connection_lost(self, _: Exception | None) -> None:
        self.gone = True
        self._load.lost += not self._closed
        self._idle.put_nowait(self)

    def close(self) -> None:
        self._closed = True
        self._transport.close()


async def drive(
    port: int, requests: list[bytes], clients: int, seconds: float, rate: float | None = None, keep: bool = False
) -> Load:
    """Send requests for so long: as fast as the clients get answers, or at a rate (exponential gaps, seed 0)."""
    loop = asyncio.get_running_loop()
    load, idle = Load(), asyncio.Queue[Client]()
    connected = [
        (await loop.create_connection(lambda: Client(load, idle, keep), "127.0.0.1", port))[1] for _ in range(clients)
    ]
    draw, sent = random.Random(0), 0
    begin = due = time.perf_counter()
    while due < begin + seconds and time.perf_counter() < begin + 2 * seconds:
        client = await idle.get()
        if client.gone:
            break
        if rate is None:
            due = time.perf_counter()
        else:
            due += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        client.send(requests[sent % len(requests)], due)
        sent += 1
    while (
        len(load.seconds) + len(load.errors) < sent and not load.lost and time.perf_counter() < begin + 3 * seconds + 30
    ):
        await asyncio.sleep(0.01)
    for each in connected:
        each.close()
    return load
