"""`eata serve` over time: a soak, and kill -9 again and again."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.serve_load import INFER, Load, drive, eata_serve, request

GROWTH = 0.05  # of memory, after the first minute
CLIENTS = 32


def add(commands: Any) -> None:
    """The two commands."""
    soaked = commands.add_parser("soak", help="full load with adaptation: memory, errors, versions and state in step")
    soaked.add_argument("--minutes", type=float, default=30)
    soaked.add_argument("--timeout", type=float, default=30, help="seconds a request may wait; more if all is paused")
    soaked.set_defaults(run=soak)
    killed = commands.add_parser("kill", help="kill -9 at random moments under load")
    killed.add_argument("--times", type=int, default=50)
    killed.add_argument("--seed", type=int, default=0)
    killed.set_defaults(run=kill)


def soak(arguments: argparse.Namespace) -> int:
    """0 if memory stayed within bounds, nothing failed, and the state on disk is the one that was served."""
    from benchmarks.serve import images

    made = record.manifest()
    content = [request(INFER, each[None]) for each in images(256)]
    minutes = arguments.minutes
    with tempfile.TemporaryDirectory() as place:
        server = eata_serve(Path(place), "--method", "eta", "--state", "state", "--timeout", str(arguments.timeout))
        try:
            server.wait_until_ready("/v2/health/ready")
            answered, errors, memories = 0, 0, []
            begin = time.monotonic()
            while time.monotonic() - begin < 60 * minutes:
                load = asyncio.run(drive(server.port, content, CLIENTS, min(20, 60 * minutes / 3)))
                answered, errors = answered + len(load.seconds), errors + len(load.errors) + load.lost
                seconds, memory = time.monotonic() - begin, server.rss()
                memories.append((round(seconds), memory))
                print(f"{seconds:6.0f} s  {answered:8} answered  {errors} errors  {memory / 1e6:.0f} MB", flush=True)
            time.sleep(5)  # the last answers have left before their step is done
            served = server.adaptation()
            log = server.end()
            saved = json.loads((Path(place) / "state" / "current.json").read_text())
        finally:
            server.end()
    in_step = (saved["version"], saved["batches"]) == (served["version"], served["batches"])
    later = [memory for seconds, memory in memories if seconds > min(60, 60 * minutes / 3)]
    growth = max(later) / later[0] - 1
    print(f"{answered} answered, {errors} errors; memory grew by {100 * growth:.1f} % after the first minute; "
          f"version {served['version']} after {served['batches']} batches, on disk "
          f"{'the same' if in_step else saved}")  # fmt: skip
    numbers = {"minutes": minutes, "answered": answered, "errors": errors, "growth": growth, "in_step": in_step}
    seen = {"version": served["version"], "batches": served["batches"], "bytes_by_second": memories}
    record.keep(arguments.out, made, {**numbers, **seen})
    return int(bool(errors) or growth > GROWTH or not in_step or "Traceback" in log)


def kill(arguments: argparse.Namespace) -> int:
    """0 if every restart was clean, and each acknowledged version was saved or named as lost."""
    from benchmarks.serve import images

    made = record.manifest()
    content = [request(INFER, each[None]) for each in images(64)]
    draw = random.Random(arguments.seed)
    failures = answers = lost = 0
    unsaved: set[int] = set()
    with tempfile.TemporaryDirectory() as place:
        for number in range(arguments.times + 1):
            server = eata_serve(
                Path(place), "--method", "tent", "--window", "0", "--state", "state", "--save-every", "5"
            )
            try:
                found = server.wait_until_ready("/v2/health/ready").adaptation()
                first, last = (found["lost"] and found["lost"]["versions"]) or (0, -1)
                lost += found["lost"]["batches"] if found["lost"] else 0
                unsaid = {version for version in unsaved if version > found["version"] and not first <= version <= last}
                if unsaid:
                    failures += 1
                    print(f"restart {number}: versions {sorted(unsaid)} answered, and are lost without being said")
                print(f"start {number}: version {found['version']}, {found['lost'] or 'nothing'} lost", flush=True)
                if number == arguments.times:
                    break
                loads: list[Load] = []
                seconds = draw.uniform(0.2, 3)
                asking = threading.Thread(
                    target=lambda loads=loads, port=server.port: loads.append(  # type: ignore[misc]
                        asyncio.run(drive(port, content, 8, 10, keep=True))
                    )
                )
                asking.start()
                time.sleep(seconds)
                log = server.end(signal.SIGKILL)
                asking.join()
                failures += "Traceback" in log
                unsaved = {int(json.loads(body)["model_version"]) for body in loads[0].bodies}
                answers += len(loads[0].bodies)
            finally:
                server.end(signal.SIGKILL)
    print(f"{arguments.times} kills, {answers} answers, {lost} batches lost and said, {failures} failures")
    numbers = {"kills": arguments.times, "seed": arguments.seed, "answers": answers, "batches_lost_and_said": lost}
    record.keep(arguments.out, made, {**numbers, "failures": failures})
    return int(failures > 0)
