"""Requests in both forms, and everything that may be wrong with them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eata.serve import protocol
from eata.serve.contract import Contract
from eata.serve.refusal import Refusal

CONTRACT = Contract("net", (1, 2, 2), (0.5,), (0.5,), ("a", "b", "c"), batch=4)
GOOD = {"name": "input", "shape": [1, 1, 2, 2], "datatype": "FP32", "data": [0.0, 0.25, 0.5, 1.0]}


def request(**changes: Any) -> bytes:
    return json.dumps({"inputs": [{**GOOD, **changes}]}).encode()


@given(st.integers(1, 4), st.integers(0, 2**32 - 1), st.booleans(), st.text(max_size=5))
def test_both_forms_give_the_same_values_and_the_answer_can_be_read(count, seed, binary, name):
    values = np.random.RandomState(seed).uniform(-1, 1, (count, 1, 2, 2)).astype(np.float32)
    tensor: dict[str, Any] = {"name": "input", "shape": [count, 1, 2, 2], "datatype": "FP32"}
    raw = values.tobytes()
    head = {"id": name, "inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}]}
    head["parameters"] = {"binary_data_output": binary}
    text = json.dumps(head).encode()
    first = protocol.parse(text + raw, str(len(text)), CONTRACT)
    listed = {**head, "inputs": [{**tensor, "data": values.tolist()}]}
    second = protocol.parse(json.dumps(listed).encode(), None, CONTRACT)
    assert (first.values == values).all()
    assert (second.values == values).all()
    logits = np.arange(count * 3, dtype=np.float32).reshape(count, 3) / 7
    body, headers = protocol.answer(first, CONTRACT, 12, logits)
    length = int(headers.get(protocol.LENGTH_HEADER, len(body)))
    answer = json.loads(body[:length])
    (output,) = answer["outputs"]
    assert (answer["model_version"], answer.get("id", "")) == ("12", name)
    found = np.frombuffer(body[length:], "<f4") if binary else np.array(output["data"], np.float32)
    assert (found.reshape(output["shape"]) == logits).all()


BAD = {
    "not JSON": b"{",
    "not an object": b"[]",
    "not text": b"\xff\xfe",
    "nested too deeply": b'{"inputs":' + b"[" * 100_000,
    "a number of 5000 digits": b'{"inputs": ' + b"9" * 5000 + b"}",
    "no inputs": b"{}",
    "two inputs": json.dumps({"inputs": [GOOD, GOOD]}).encode(),
    "inputs of another kind": b'{"inputs": ["input"]}',
    "another name": request(name="x"),
    "no datatype": json.dumps({"inputs": [{key: GOOD[key] for key in ("name", "shape", "data")}]}).encode(),
    "another datatype": request(datatype="FP64"),
    "a datatype that is a list": request(datatype=[]),
    "another shape": request(shape=[1, 1, 2, 3]),
    "shape of text": request(shape="1122"),
    "shape with true": request(shape=[True, 1, 2, 2]),
    "negative shape": request(shape=[-1, 1, 2, 2]),
    "huge shape": request(shape=[10**12, 1, 2, 2]),
    "no samples": request(shape=[0, 1, 2, 2], data=[]),
    "too many samples": request(shape=[5, 1, 2, 2], data=[0.0] * 20),
    "too few values": request(data=[0.0]),
    "ragged": request(data=[[0.0], [1.0, 2.0, 3.0]]),
    "text for numbers": request(data=["0", "0", "0", "0"]),
    "null for a number": request(data=[0.0, None, 0.0, 0.0]),
    "huge integer": request(data=[0, 0, 0, 10**30]),
    "no data": json.dumps({"inputs": [{key: GOOD[key] for key in ("name", "shape", "datatype")}]}).encode(),
    "NaN": request(data=[0.0, float("nan"), 0.0, 0.0]),
    "infinity": request(data=[0.0, float("inf"), 0.0, 0.0]),
    "beyond float32": request(data=[0.0, 1e300, 0.0, 0.0]),
    "far from an image": request(data=[0.0, 50.0, 0.0, 0.0]),
    "parameters of another kind": request(parameters=[]),
    "binary size without binary": request(parameters={"binary_data_size": 16}),
    "an id that is a number": json.dumps({"id": 3, "inputs": [GOOD]}).encode(),
    "another output": json.dumps({"inputs": [GOOD], "outputs": [{"name": "x"}]}).encode(),
    "shared memory": json.dumps(
        {"inputs": [GOOD], "outputs": [{"name": "logits", "parameters": {"shared_memory_region": "r"}}]}
    ).encode(),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_a_wrong_request_is_refused_with_a_sentence(body):
    with pytest.raises(Refusal) as refused:
        protocol.parse(body, None, CONTRACT)
    assert refused.value.status == 400
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("length", ["", "-1", "x", "1e3", "9" * 30, "100000", "５"])
def test_a_wrong_length_of_the_header_is_refused(length):
    with pytest.raises(Refusal, match="Inference-Header-Content-Length"):
        protocol.parse(request(), length, CONTRACT)


@pytest.mark.parametrize("size", [0, 12, 20, -16, "16", 16.0, True, None, [16]])
def test_a_wrong_binary_size_is_refused(size):
    head = {**GOOD, "parameters": {"binary_data_size": size}}
    if size is None:  # bytes that nobody asked for
        head = GOOD
    text = json.dumps({"inputs": [head]}).encode()
    with pytest.raises(Refusal):
        protocol.parse(text + bytes(16), str(len(text)), CONTRACT)


@given(st.binary(max_size=200), st.integers(0, 250))
def test_no_bytes_raise_anything_else(body, length):
    with pytest.raises(Refusal):
        protocol.parse(body, str(length), CONTRACT)
