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
from benchmarks.serve_load import INFER, Load, Server, drive, eata_serve, request

GROWTH = 0.05  # of memory, after the first minute
CLIENTS = 32
LOOK = 20  # seconds of load between two looks at the server


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
    """0 if memory stayed within bounds, nothing failed, and the state on disk is the one that was served.

    What was seen so far is kept after each look: a soak that is cut off leaves its curve, with ``finished`` false.
    """
    from benchmarks.serve import images

    made = record.manifest()
    content = [request(INFER, each[None]) for each in images(256)]
    length = 60 * arguments.minutes
    curve: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as place:
        server = eata_serve(Path(place), "--method", "eta", "--state", "state", "--timeout", str(arguments.timeout))
        try:
            server.wait_until_ready("/v2/health/ready")
            begin = time.monotonic()
            while time.monotonic() - begin < length:
                load = asyncio.run(drive(server.port, content, CLIENTS, min(LOOK, length / 3)))
                curve.append(_seen(server, load, round(time.monotonic() - begin), curve))
                print("{second:6} of {0:.0f} s {answered:8} answered  {errors} errors  version {version}  {1:.0f} MB"
                      .format(length, curve[-1]["bytes"] / 1e6, **curve[-1]), flush=True)  # fmt: skip
                seen = {"minutes": arguments.minutes, "growth": growth(curve, length), **curve[-1]}
                record.keep(arguments.out, made, {**seen, "finished": False, "curve": curve})
            time.sleep(5)  # the last answers have left before their step is done
            served = server.adaptation()
            log = server.end()
            saved = json.loads((Path(place) / "state" / "current.json").read_text())
        finally:
            server.end()
    in_step = (saved["version"], saved["batches"]) == (served["version"], served["batches"])
    seen |= {"version": served["version"], "batches": served["batches"], "in_step": in_step}
    print("{answered} answered, {errors} errors; memory grew by {0:.1f} % after the first minute; "
          "version {version} after {batches} batches, on disk {1}"
          .format(100 * seen["growth"], "the same" if in_step else saved, **seen))  # fmt: skip
    record.keep(arguments.out, made, {**seen, "finished": True, "curve": curve})
    return int(bool(seen["errors"]) or seen["growth"] > GROWTH or not in_step or "Traceback" in log)


def _seen(server: Server, load: Load, second: int, before: list[dict[str, int]]) -> dict[str, int]:
    """One look: answers and errors in all, and the server as it is."""
    last = before[-1] if before else {"answered": 0, "errors": 0}
    found = server.adaptation()
    return {
        "second": second,
        "answered": last["answered"] + len(load.seconds),
        "errors": last["errors"] + len(load.errors) + load.lost,
        "version": found["version"],
        "batches": found["batches"],
        "bytes": server.rss(),
    }


def growth(curve: list[dict[str, int]], length: float) -> float:
    """Of memory, from the first look after the first minute (the first third of a short soak) to the highest one.

    >>> growth([{"second": 20, "bytes": 100}, {"second": 61, "bytes": 200}, {"second": 81, "bytes": 210}], 1800)
    0.05
    """
    later = [look["bytes"] for look in curve if look["second"] > min(60, length / 3)]
    return round(max(later) / later[0] - 1, 4) if later else 0.0


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
