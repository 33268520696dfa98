"""The endpoints over a real socket, with the clients that people use."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import socket
import threading
import time
import zlib

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

import eata
from serve_net import HEADERS, NET, TOKEN, binary, images, learner, small_net, tensor


def picture(size: tuple[int, int] = (20, 24), kind: str = "PNG", **options: object) -> bytes:
    draw = np.random.RandomState(0).randint(0, 256, (*size, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(draw).save(buffer, kind, **options)
    return buffer.getvalue()


def bomb(side: int = 50_000) -> bytes:
    """A small PNG file that claims to hold more pixels than memory does."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    rows = zlib.compress(bytes(1_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritons_own_client(served, binary_in, binary_out):
    server = served(learner(), batch=8)
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata(headers=dict(HEADERS))["name"] == "eata"
    assert client.is_model_ready("net", headers=dict(HEADERS))
    metadata = client.get_model_metadata("net", headers=dict(HEADERS))
    assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 3, 16, 16]}]
    alone = learner()
    for number in range(3):
        x = images(4, number)
        asked = triton.InferInput("input", list(x.shape), "FP32")
        asked.set_data_from_numpy(x, binary_data=binary_in)
        wanted = [triton.InferRequestedOutput("logits", binary_data=binary_out)]
        answer = client.infer("net", [asked], outputs=wanted, request_id=str(number), headers=dict(HEADERS))
        assert answer.get_response()["model_version"] == answer.get_response()["id"] == str(number)
        assert (answer.as_numpy("logits") == alone(torch.from_numpy(x)).numpy()).all()
    defaults = client.infer("net", [asked], headers=dict(HEADERS))  # no outputs named: all of them, binary
    assert defaults.as_numpy("logits").shape == (4, 3)
    with pytest.raises(InferenceServerException, match="no model"):
        client.infer("other", [asked], headers=dict(HEADERS))
    with pytest.raises(InferenceServerException, match="token"):
        client.infer("net", [asked])
    client.close()


def test_tritons_client_reaches_a_kept_version(served):
    server = served(learner(), batch=8, save_every=1)
    for number in range(3):
        server.client.post(f"{NET}/infer", json=tensor(images(4, number)))
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    x = images(4, 9)
    asked = triton.InferInput("input", list(x.shape), "FP32")
    asked.set_data_from_numpy(x)
    before = server.weights()
    answer = client.infer("net", [asked], model_version="0", headers=dict(HEADERS))
    source = learner()
    with source.frozen():
        assert (answer.as_numpy("logits") == source(torch.from_numpy(x)).numpy()).all()
    server.client.post("/v1/adaptation/resume")  # behind the last save in the queue
    assert client.get_model_metadata("net", "0", headers=dict(HEADERS))["versions"] == ["0", "1", "2", "3"]
    with pytest.raises(InferenceServerException, match="no version"):
        client.infer("net", [asked], model_version="99", headers=dict(HEADERS))
    assert all((value == before[name]).all() for name, value in server.weights().items())
    client.close()


def test_a_real_net_through_the_endpoint_is_the_net_itself(served):
    stream = eata.data.load("digits")
    net = eata.models.load("resnet26-bn-digits")
    config = net.pretrained_cfg
    batches = stream.batches(16, seed=0, mean=config["mean"], std=config["std"])
    server = served(eata.ETA(net, **eata.preset("digits", eata.ETA)))
    alone = eata.ETA(eata.models.load("resnet26-bn-digits"), **eata.preset("digits", eata.ETA))
    for _, (x, _) in zip(range(3), batches, strict=False):
        content, headers = binary(x.numpy())
        answer = server.client.post(f"{NET}/infer", content=content, headers=headers).json()
        expected = alone(x).numpy().ravel().tolist()
        assert answer["outputs"][0]["data"] == expected


def test_image_files_get_classes_and_confidences(served):
    server = served(learner(), batch=8)
    files = [("files", ("one.png", picture())), ("files", ("two.jpg", picture((30, 16), "JPEG"))),
             ("files", ("same.png", picture((16, 16))))]  # fmt: skip
    answer = server.client.post("/predict", files=files).json()
    assert [each["file"] for each in answer["predictions"]] == ["one.png", "two.jpg", "same.png"]
    assert answer["version"] == 0
    for each in answer["predictions"]:
        assert each["class"] == "abc"[each["index"]]
        assert sum(top["confidence"] for top in each["top"]) == pytest.approx(1, abs=1e-5)
        assert each["confidence"] == each["top"][0]["confidence"]
    assert server.engine.model.stats.forwards == 3


def refusals() -> dict[str, tuple[int, str, dict[str, object]]]:
    far = images(2)
    far[0, 0, 0, 0] = 1e30
    nan = images(2)
    nan[1, 2, 3, 4] = np.nan
    raw, length = binary(nan)
    cut, cut_length = binary(images(2))
    form = {"files": ("x.png", picture()[:200])}
    return {
        "wrong shape": (400, f"{NET}/infer", {"json": tensor(np.zeros((1, 3, 8, 8)))}),
        "wrong type": (400, f"{NET}/infer", {"content": b'{"inputs": [{"name": "input", "datatype": "INT8"}]}'}),
        "NaN": (400, f"{NET}/infer", {"content": raw, "headers": length}),
        "a value that no image has": (400, f"{NET}/infer", {"json": tensor(far)}),
        "truncated binary": (400, f"{NET}/infer", {"content": cut[:-4], "headers": cut_length}),
        "too many samples": (400, f"{NET}/infer", {"json": tensor(images(9))}),
        "no body": (400, f"{NET}/infer", {}),
        "compressed": (415, f"{NET}/infer", {"content": b"x", "headers": {"Content-Encoding": "gzip"}}),
        "too large": (413, f"{NET}/infer", {"content": bytes(3_000_000)}),
        "too large, and does not say so": (413, f"{NET}/infer", {"content": iter([bytes(1_000_000)] * 3)}),
        "unknown model": (404, "/v2/models/other/infer", {"json": tensor(images(1))}),
        "unknown version": (404, f"{NET}/versions/7/infer", {"json": tensor(images(1))}),
        "no number": (404, f"{NET}/versions/x/infer", {"json": tensor(images(1))}),
        "a path": (404, "/v2/models/..%2f..%2fetc/infer", {"json": tensor(images(1))}),
        "truncated image": (400, "/predict", {"files": form}),
        "decompression bomb": (400, "/predict", {"files": {"files": ("bomb.png", bomb())}}),
        "no image": (400, "/predict", {"files": {"files": ("x.png", b"GIF89a nonsense")}}),
        "a format with a program in it": (400, "/predict", {"files": {"files": ("x.eps", b"%!PS-Adobe-3.0 EPSF-3.0")}}),
        "too many files": (400, "/predict", {"files": [("files", (f"{n}.png", picture())) for n in range(9)]}),
        "no form": (415, "/predict", {"content": picture()}),
        "a form without files": (400, "/predict", {"files": {"note": (None, "hello")}}),
        "a broken form": (400, "/predict", {"content": b"--x\r\nnonsense",
                                            "headers": {"Content-Type": "multipart/form-data; boundary=x"}}),
        "a form without boundary": (400, "/predict", {"content": b"x",
                                                      "headers": {"Content-Type": "multipart/form-data"}}),
    }  # fmt: skip


def test_bad_input_gets_a_json_error_and_moves_nothing(served):
    server = served(learner(), batch=8, body=2)
    server.client.post(f"{NET}/infer", json=tensor(images(8)))
    before, stats = server.weights(), server.engine.model.stats.forwards
    for name, (status, path, options) in refusals().items():
        answer = server.client.post(path, **options)
        assert answer.status_code == status, (name, answer.text)
        assert set(answer.json()) == {"error"}, name
        assert answer.headers["content-type"] == "application/json", name
    for method, path, status in (("GET", "/nothing", 404), ("PUT", "/v2", 405), ("GET", f"{NET}/infer", 405)):
        answer = server.client.request(method, path)
        assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert server.engine.model.stats.forwards == stats
    assert server.engine.mark.version == 1
    assert all((value == before[name]).all() for name, value in server.weights().items())


@pytest.mark.parametrize("path", [f"{NET}/infer", "/predict", "/v1/adaptation/rollback"])
def test_a_body_that_never_ends_is_given_up(served, path):
    server = served(learner(), timeout=0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n"
        raw.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n{{".encode())
        assert b"408" in raw.recv(1000).split(b"\r\n")[0]


def test_bodies_that_are_promised_all_at_once_are_bounded(served):
    server = served(learner(), body=1, timeout=20)
    head = f"POST {NET}/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30)) for _ in range(16)]
        for place in places:
            place.sendall(head.encode())
        deadline = time.monotonic() + 60
        while (answer := server.client.post(f"{NET}/infer", content=bytes(900_000))).status_code == 400:
            assert time.monotonic() < deadline  # the last of them is on its way
        assert answer.status_code == 429
        assert answer.headers["Retry-After"] == "1"
        assert server.client.get("/v2").status_code == 200  # without a body there is nothing to bound
    while (answer := server.client.post(f"{NET}/infer", json=tensor(images(4)))).status_code == 429:
        assert time.monotonic() < deadline  # those who hung up count no more
    assert answer.status_code == 200


class Slow(eata.Tent):
    """Tent that waits to be let go."""

    begun: threading.Event
    go: threading.Event

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.set()
        assert self.go.wait(60)
        return super().__call__(x)


def test_full_queue_and_too_slow(served):
    model = Slow(small_net(), lr=0.05)
    model.begun, model.go = threading.Event(), threading.Event()
    server = served(model, batch=4, queue=8, timeout=1)

    async def ask() -> list[httpx.Response]:
        address = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=address, headers=HEADERS, timeout=60) as client:
            first = asyncio.create_task(client.post(f"{NET}/infer", json=tensor(images(4))))
            while not model.begun.is_set():
                await asyncio.sleep(0.01)
            others = [asyncio.create_task(client.post(f"{NET}/infer", json=tensor(images(4, n)))) for n in range(3)]
            done = await asyncio.gather(*others)
            model.go.set()
            return [await first, *done]

    first, *others = asyncio.run(ask())
    assert first.status_code == 200  # begun before the time was over, so it is answered
    assert sorted(answer.status_code for answer in others) == [429, 504, 504]
    refused = next(answer for answer in others if answer.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert all(set(answer.json()) == {"error"} for answer in others)
    assert model.stats.forwards == 4


def test_the_token_guards_everything_but_health(served):
    server = served(learner())
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as stranger:
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert stranger.get(path).status_code == 200
        for path in ("/", "/docs", "/openapi.json", "/metrics", "/v2", NET, "/v1/adaptation", "/v1/adaptation/live"):
            answer = stranger.get(path)
            assert (answer.status_code, set(answer.json())) == (401, {"error"}), path
        for path in (
            f"{NET}/infer",
            "/predict",
            *(f"/v1/adaptation/{name}" for name in ("freeze", "reset", "rollback")),
        ):
            assert stranger.post(path).status_code == 401, path
        for wrong in ("Bearer", "Bearer a", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Basic !", f"Digest {TOKEN}", "\xff"):
            given = {"Authorization": wrong.encode("latin-1")}
            assert stranger.get("/v2", headers=given).status_code in (400, 401), wrong
        basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
        assert stranger.get("/v2", headers={"Authorization": f"Basic {basic}"}).status_code == 200
        asked = stranger.get("/v2").headers["WWW-Authenticate"]
        assert "Basic" in asked  # so a browser asks
        far = {**HEADERS, "Origin": "http://elsewhere.example"}
        assert stranger.post("/v1/adaptation/reset", headers=far).status_code == 403
        near = {**HEADERS, "Origin": f"http://127.0.0.1:{server.port}"}
        assert stranger.post("/v1/adaptation/reset", headers=near).status_code == 200


def test_without_a_token_nobody_is_the_operator(served):
    server = served(learner(), token=None)
    assert server.client.get("/v1/adaptation").status_code == 200
    assert server.client.post(f"{NET}/infer", json=tensor(images(4))).status_code == 200
    for name in ("freeze", "resume", "reset", "rollback"):
        assert server.client.post(f"/v1/adaptation/{name}", json={"version": 0}).status_code == 403
    server.settle()
    assert server.engine.mark.version == 1


def test_adaptation_is_shown_and_steered(served, tmp_path):
    server = served(learner(), batch=8, state=tmp_path, save_every=1, source=small_net())
    for number in range(3):
        server.client.post(f"{NET}/infer", json=tensor(images(4, number)))
    server.settle()
    found = server.client.get("/v1/adaptation").json()
    assert (found["version"], found["batches"], found["method"]) == (3, 3, "Tent")
    assert found["stats"]["forwards"] == 12
    found = server.client.post("/v1/adaptation/freeze").json()
    assert found["frozen"] is True
    assert [kept["version"] for kept in found["versions"]] == [0, 1, 2, 3]
    server.client.post(f"{NET}/infer", json=tensor(images(4, 5)))
    assert server.client.get("/v1/adaptation").json()["version"] == 3
    assert server.client.post("/v1/adaptation/resume").json()["frozen"] is False
    assert server.client.post("/v1/adaptation/rollback", json={"version": 1}).json()["version"] == 1
    for wrong in (b"", b"[]", b"{}", b'{"version": "1"}', b'{"version": true}', b"[" * 100_000):
        assert server.client.post("/v1/adaptation/rollback", content=wrong).status_code == 400
    assert server.client.post("/v1/adaptation/rollback", json={"version": 50}).status_code == 404
    assert server.client.post("/v1/adaptation/reset").json()["version"] == 4
    live = server.client.get("/v1/adaptation/live").json()
    assert live["classes"] == ["a", "b", "c"]
    assert live["images"][0]["image"].startswith("data:image/png;base64,")
    assert sum(live["series"]["now"]) == pytest.approx(1)


def test_metrics_count(served):
    server = served(learner(), batch=8)
    for number in range(3):
        server.client.post(f"{NET}/infer", json=tensor(images(4, number)))
    server.client.post(f"{NET}/infer", json=tensor(images(9)))
    server.settle()
    text = server.client.get("/metrics").text
    path = "/v2/models/{model}/infer"
    for line in (
        f'eata_requests_total{{endpoint="{path}",status="200"}} 3.0',
        f'eata_requests_total{{endpoint="{path}",status="400"}} 1.0',
        f'eata_request_seconds_count{{endpoint="{path}"}} 4.0',
        *("eata_samples_total 12.0", "eata_steps_total 3.0", "eata_batches_total 3.0", "eata_version 3.0"),
        *("eata_chosen_samples_total 12.0", "eata_queue_samples 0.0", "eata_client_share 1.0", "eata_alarms_total 0.0"),
    ):
        assert line in text, line
    names = ("entropy_nats", "drift_nats", "source_disagreement", "batch_samples_bucket", "kept_versions", "frozen")
    assert all(f"eata_{name}" in text for name in names)
