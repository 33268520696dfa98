"""Real servers: in a thread, and as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

import eata
import eata.serve
from serve_net import HEADERS, NET, OWN, TOKEN, binary, images


class Served:
    """A server in a thread, and a client of it."""

    def __init__(self, model: eata.Adapter, **arguments: Any) -> None:
        self.app = eata.serve.app(model, **{"name": "net", "token": TOKEN, "wait": 1, **arguments})
        self.engine = self.app.state.engine
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> Served:
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert self.thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=HEADERS, timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def settle(self) -> None:
        """Wait for the step of the last batch, whose answers have left before it."""
        self.engine.snapshot().result(60)

    def weights(self) -> dict[str, torch.Tensor]:
        self.settle()
        return {name: value.clone() for name, value in self.engine.model.net.state_dict().items()}


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """Factory of running servers: ``served(model, batch=8)``."""
    with contextlib.ExitStack() as stack:
        yield lambda model, **arguments: stack.enter_context(Served(model, **arguments))


class Process:
    """``eata serve`` as an operator runs it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "own.py").write_text(OWN)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        command = [sys.executable, "-c", "from eata.cli import main; main()", "serve", "own:net", "--method", "tent"]
        options = ["--window", "0", "--lr", "0.05", "--token", TOKEN, "--port", str(self.port), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.log = folder / f"log-{self.port}.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=HEADERS, timeout=60)

    def wait_until_ready(self) -> Process:
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/v2/health/ready").status_code == 200:
                    return self
            time.sleep(0.05)

    def infer(self, seed: int = 0) -> dict[str, Any]:
        content, headers = binary(images(4, seed))
        answer = self.client.post(f"{NET}/infer", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def end(self, number: int = signal.SIGTERM) -> str:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(60)
        self.client.close()
        return self.log.read_text()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Factory of ``eata serve`` processes in one folder."""
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        started.append(Process(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.end(signal.SIGKILL)
