"""``eata serve`` as a process: stopped, killed, started again, started twice."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve_net import HEADERS, NET, binary, images, tensor


def test_sigterm_answers_what_waits_and_saves(process, tmp_path):
    server = process("--state", "state", "--save-every", "1000", "--wait", "1500", "--batch", "64").wait_until_ready()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.infer()))
    asking.start()
    while "eata_queue_samples 4.0" not in server.client.get("/metrics").text:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert answers[0]["model_version"] == "0"
    log = server.end()
    assert server.process.returncode in (0, -signal.SIGTERM), log
    again = process("--state", "state").wait_until_ready()
    found = again.client.get("/v1/adaptation").json()
    assert (found["version"], found["batches"], found["lost"]) == (1, 1, None)


def load(server, made_by: set[int]) -> None:
    """Ask until the server is gone; which versions answered goes into ``made_by``."""
    seed = 0
    while True:
        try:
            made_by.add(int(server.infer(seed)["model_version"]))
        except httpx.TransportError:
            return
        seed += 1


def test_after_kill_9_what_is_lost_is_said_and_no_number_comes_twice(process):
    draw = random.Random(0)
    unsaved: set[int] = set()
    newest = losses = 0
    for _ in range(4):
        server = process("--state", "state", "--save-every", "7").wait_until_ready()
        found = server.client.get("/v1/adaptation").json()
        first, last = (found["lost"] and found["lost"]["versions"]) or (0, -1)
        losses += bool(found["lost"] and found["lost"]["batches"])
        assert all(version <= found["version"] or first <= version <= last for version in unsaved)
        assert found["events"] == [] or found["events"][0]["kind"] in ("lost", "start")
        unsaved = set()
        asking = threading.Thread(target=load, args=(server, unsaved))
        asking.start()
        time.sleep(draw.uniform(0.3, 1.0))
        assert "Traceback" not in server.end(signal.SIGKILL)
        asking.join(60)
        fresh = {version for version in unsaved if version != found["version"]}
        assert fresh
        assert min(fresh) > max(newest, last)  # no number of a lost version is given again
        newest = max(fresh)
    assert losses


def test_a_second_server_on_one_state_folder_refuses(process):
    first = process("--state", "state").wait_until_ready()
    first.infer()
    second = process("--state", "state")
    second.process.wait(120)
    log = second.log.read_text()
    assert second.process.returncode == 2, log
    assert "Another server is writing to" in log
    assert "Traceback" not in log
    assert first.infer()["model_version"] == "1"


def test_a_port_that_is_taken_is_said(process, tmp_path):
    first = process().wait_until_ready()
    second = process("--port", str(first.port))
    second.process.wait(120)
    assert second.process.returncode != 0
    assert "address already in use" in second.log.read_text()


@pytest.mark.parametrize("believed", [True, False])
def test_whose_traffic_it_is_only_a_trusted_proxy_says(process, believed):
    options = ("--proxy", "127.0.0.1") if believed else ()
    server = process("--share", "0.5", "--wait", "2000", "--batch", "8", *options).wait_until_ready()
    content, headers = binary(images(4))

    def ask(client: str) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{server.port}{NET}/infer",
            content=content,
            headers={**HEADERS, **headers, "X-Forwarded-For": client},
            timeout=60,
        )

    with ThreadPoolExecutor(2) as pool:  # eight samples make a batch: two clients', if the header is believed
        assert [answer.status_code for answer in pool.map(ask, ["10.0.0.1", "10.0.0.2"])] == [200, 200]
    found = server.client.post("/v1/adaptation/resume").json()  # behind the step of the last batch
    assert found["version"] == (1 if believed else 0)
    assert f"eata_limited_samples_total {0.0 if believed else 8.0}" in server.client.get("/metrics").text


def test_a_window_lets_single_images_in(process):
    server = process("--window", "64", "--wait", "0").wait_until_ready()
    assert server.client.get("/v1/adaptation").json()["method"] == "Window of Tent"
    answer = server.client.post(f"{NET}/infer", json=tensor(images(1)))
    assert answer.status_code == 200
