"""Two replicas and a writer on a real Ray cluster; each is killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eata.errors import EataError
from serve_net import HEADERS, NET, OWN, TOKEN, images, tensor

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'eata[ray]'")
pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'eata[ray]'")

from eata.serve import replicas  # noqa: E402
from eata.serve.recipe import Recipe  # noqa: E402

OPTIONS = {"name": "net", "batch": 8, "wait": 1.0, "queue": 64, "timeout": 30.0, "share": 1.0, "save_every": 2}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    import socket

    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    recipe = Recipe("own:net", method="tent", lr=0.05, window=0)
    options = {**OPTIONS, "state": tmp_path / "state"}
    stop = replicas.deploy(recipe, 2, options, TOKEN, 1.0, "127.0.0.1", port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=60) as client:
            yield client
    finally:
        stop()


def infer(client: httpx.Client, seed: int = 0) -> int:
    answer = client.post(f"{NET}/infer", json=tensor(images(8, seed)))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["model_version"])


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 180
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def test_replicas_follow_the_writer_and_outlive_it(cluster: httpx.Client) -> None:
    assert infer(cluster) == 0
    until(lambda: infer(cluster) > 0)  # learnt elsewhere, published, taken over
    found = cluster.get("/v1/adaptation").json()
    assert (found["writer"], found["replicas"], found["method"]) == (True, 2, "Tent")
    assert cluster.post("/v1/adaptation/reset").json()["writer"]
    assert cluster.get("/v1/adaptation/live").json()["classes"] == ["a", "b", "c"]

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if "REPLICA" in each["name"]]
    assert len(names) == 2
    ray.kill(ray.get_actor(names[0], namespace="serve"), no_restart=True)

    def replaced() -> bool:
        infer(cluster)  # the other one goes on meanwhile
        now = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if "REPLICA" in each["name"]]
        return len(now) == 2 and names[0] not in now

    until(replaced)

    before = cluster.get("/v1/adaptation").json()["version"]
    ray.kill(ray.get_actor(replicas.WRITER, replicas.NAMESPACE), no_restart=False)  # as a crash: Ray starts it again
    infer(cluster)
    back = until(lambda: (found := cluster.get("/v1/adaptation").json())["writer"] and found)
    assert back["version"] <= before or back["batches"] >= found["batches"]
    assert back["events"][0]["kind"] in ("lost", "start")

    ray.kill(ray.get_actor(replicas.WRITER, replicas.NAMESPACE), no_restart=True)  # and now for good
    until(lambda: not cluster.get("/v1/adaptation").json()["writer"])
    last = {infer(cluster, seed) for seed in range(10)}
    assert len(last) <= 2  # each replica goes on with the version that it has
    answer = cluster.post("/v1/adaptation/freeze")
    assert (answer.status_code, set(answer.json())) == (503, {"error"})


def test_replicas_need_a_state_folder() -> None:
    with pytest.raises(EataError, match="--state"):
        replicas.deploy(Recipe("resnet26-bn-digits"), 2, {**OPTIONS, "state": None}, None, 1.0, "127.0.0.1", 1)


def test_the_command_stops_when_told_and_keeps_its_state(process: Callable[..., Any], tmp_path: Path) -> None:
    server = process("--replicas", "1", "--state", "state", "--wait", "1")
    until(lambda: server.process.poll() is not None or "replicas and a writer" in server.log.read_text())
    server.wait_until_ready()
    server.infer()
    until(lambda: server.client.get("/v1/adaptation").json()["version"])
    version = server.client.get("/v1/adaptation").json()["version"]
    log = server.end()
    assert server.process.returncode == 0, log
    assert "Traceback" not in log
    assert json.loads((tmp_path / "state" / "current.json").read_text())["version"] >= version
