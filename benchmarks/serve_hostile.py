"""Hostile requests for `eata serve`: from its OpenAPI schema (schemathesis), and broken binary forms."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import torch
import uvicorn
from torch import nn

from benchmarks import record

TOKEN = "benchmark"
SHAPE = (3, 16, 16)


def add(commands: Any) -> None:
    """The command."""
    hostile = commands.add_parser("hostile", help="no 500, and no weight moved by a request that was refused")
    hostile.add_argument("--requests", type=int, default=10_000)
    hostile.add_argument("--seed", type=int, default=0)
    hostile.set_defaults(run=run)


def small() -> nn.Module:
    """A net that is quick and sure, so that each accepted request moves it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 5, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    with torch.no_grad():
        net[-1].weight *= 8
    config = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": SHAPE, "num_classes": 3}
    net.pretrained_cfg = config  # type: ignore[assignment]
    return net.eval()


@contextlib.contextmanager
def served() -> Iterator[tuple[Any, str]]:
    """A server in a thread of this process, so that its weights can be looked at; gives its app and address."""
    import eata.serve

    app = eata.serve.app(eata.Tent(small(), lr=0.01), name="net", token=TOKEN, batch=8, wait=0, timeout=5, body=1)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield app, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


class Witness:
    """Looks at the weights after each answer."""

    def __init__(self, app: Any) -> None:
        self._engine = app.state.engine
        self._before = self._weights()
        self.statuses: Counter[int] = Counter()
        self.problems: list[str] = []

    def _weights(self) -> bytes:
        self._engine.snapshot().result(60)  # the last answer has left before its step was done
        return b"".join(value.numpy().tobytes() for value in self._engine.model.net.state_dict().values())

    def see(self, status: int, told: str) -> None:
        self.statuses[status] += 1
        now = self._weights()
        if status >= 500:
            self.problems.append(f"{status}: {told[:300]}")
        if status >= 400 and now != self._before:
            self.problems.append(f"{status}, and weights moved: {told[:300]}")
        self._before = now


def by_schema(app: Any, address: str, requests: int, seed: int, witness: Witness) -> None:
    """Requests that schemathesis makes of the OpenAPI document, half of them meant to break it."""
    import hypothesis
    import schemathesis

    schema = schemathesis.openapi.from_dict(app.openapi())
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    posting = [each for each in operations if each.method.upper() == "POST"]
    share = max(1, requests // (2 * len(posting) + len(operations)))
    for operation in operations:
        for mode in modes if operation in posting else modes[:1]:

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=share, deadline=None, database=None, phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )  # fmt: skip
            @hypothesis.given(operation.as_strategy(generation_mode=mode, **known(operation.path, mode == modes[0])))
            def one(case: Any) -> None:
                case.headers = {**(case.headers or {}), "Authorization": f"Bearer {TOKEN}"}
                try:
                    answer = case.call(base_url=address, timeout=30)
                except Exception as problem:  # a request that the client itself can't send
                    witness.see(0, f"{type(problem).__name__}")
                    return
                witness.see(answer.status_code, f"{case.method} {case.path} {answer.text}")

            with contextlib.suppress(hypothesis.errors.Unsatisfiable):
                one()


def known(path: str, good: bool) -> dict[str, Any]:
    """The model's name and a version that is there, for requests that are meant to be good."""
    names = {name: value for name, value in (("model", "net"), ("version", "0")) if f"{{{name}}}" in path}
    return {"path_parameters": names} if good and names else {}


def by_bytes(address: str, requests: int, seed: int, witness: Witness) -> None:
    """Requests in binary form with something wrong in most of them."""
    draw = random.Random(seed)
    with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as client:
        for _ in range(requests):
            body, length = broken(draw)
            headers = {} if length is None else {"Inference-Header-Content-Length": length}
            try:
                answer = client.post("/v2/models/net/infer", content=body, headers=headers)
            except httpx.TransportError as problem:
                witness.see(0, str(problem))
                continue
            witness.see(answer.status_code, f"{body[:120]!r} {length} {answer.text}")


def broken(draw: random.Random) -> tuple[bytes, str | None]:
    """A good request with up to three things changed: fields, values, bytes, lengths."""
    count = draw.choice([1, 2, 8])
    values = np.random.RandomState(draw.randrange(2**32)).uniform(-1, 1, (count, *SHAPE)).astype("<f4")
    strange: list[Any] = [None, True, -1, 0, 2**63, 1e308, "", "FP32", [], {}, [[]], "\x00", "input", 10**40]
    tensor: dict[str, Any] = {"name": "input", "shape": list(values.shape), "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": values.nbytes}
    request: dict[str, Any] = {"inputs": [tensor], "id": "x"}
    tail, head_change, length_change = values.tobytes(), False, False
    for _ in range(draw.randint(0, 3)):
        kind = draw.randrange(9)
        if kind == 0:
            tensor[draw.choice(list(tensor))] = draw.choice(strange)
        elif kind == 1:
            request[draw.choice(["inputs", "id", "outputs", "parameters"])] = draw.choice(strange)
        elif kind == 2:
            tensor["parameters"] = {"binary_data_size": draw.choice([*strange, len(tail) - 4, len(tail) + 1])}
        elif kind == 3:
            values.reshape(-1)[draw.randrange(values.size)] = draw.choice([np.nan, np.inf, -np.inf, 1e38, 100, 1e-45])
            tail = values.tobytes()
        elif kind == 4:
            tail = tail[: draw.randrange(len(tail) + 1)]
        elif kind == 5:
            tail += draw.randbytes(draw.randrange(1, 50))
        elif kind == 6:
            head_change = True
        elif kind == 7:
            length_change = True
        else:
            tensor["shape"] = draw.choice([[count], [count, 3, 16], [10**9, *SHAPE], [count, 16, 16, 3], [0, *SHAPE]])
    head = json.dumps(request).encode()
    length = str(len(head))
    if head_change:
        at = draw.randrange(len(head))
        head = head[:at] + draw.randbytes(draw.randrange(4)) + head[at + draw.randrange(4) :]
    if length_change:
        length = draw.choice(["", "0", "-5", "1e9", "99999999999", str(len(head) + 1), str(len(head) - 1), "x" * 50])
    return head + tail, None if draw.random() < 0.05 else length


def attack(requests: int, seed: int) -> Witness:
    """Half of the requests each way."""
    with served() as (app, address):
        witness = Witness(app)
        by_schema(app, address, requests // 2, seed, witness)
        by_bytes(address, requests - sum(witness.statuses.values()), seed, witness)
    return witness


def run(arguments: argparse.Namespace) -> int:
    """0 if nothing broke."""
    made = record.manifest()
    witness = attack(arguments.requests, arguments.seed)
    print(f"{sum(witness.statuses.values())} requests: {dict(sorted(witness.statuses.items()))} (0: could not be sent)")
    for problem in witness.problems[:20]:
        print(problem)
    print(f"{len(witness.problems)} problems")
    numbers = {"requests": sum(witness.statuses.values()), "seed": arguments.seed, "problems": witness.problems}
    record.keep(arguments.out, made, {**numbers, "by_status": dict(sorted(witness.statuses.items()))})
    return int(bool(witness.problems))
