"""The Open Inference Protocol v2 as pure functions: requests to arrays, answers to bytes; JSON and the binary form."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eata.serve.contract import DATATYPE, INPUT, OUTPUT, Contract, Floats
from eata.serve.refusal import Refusal

LENGTH_HEADER = "Inference-Header-Content-Length"
MOST_DIGITS = 9  # of the length in that header


@dataclasses.dataclass(frozen=True)
class Request:
    """One parsed request.

    Args:
        id: the client's own name for it, given back; "" for none.
        values: the samples, checked.
        binary: whether the logits are wanted in binary form.
    """

    id: str
    values: Floats
    binary: bool


def parse(body: bytes, length: str | None, contract: Contract) -> Request:
    """Read an inference request; anything odd about it raises a ``Refusal``.

    Args:
        body: as received.
        length: the header ``Inference-Header-Content-Length``, None where the whole body is JSON.
        contract: what the model takes.

    >>> net = Contract("net", (1, 1, 1), (0.0,), (1.0,), ("a", "b"), batch=4)
    >>> tensor = {"name": "input", "shape": [2, 1, 1, 1], "datatype": "FP32", "data": [0.0, 1.0]}
    >>> parse(json.dumps({"inputs": [tensor]}).encode(), None, net).values.ravel().tolist()
    [0.0, 1.0]
    """
    head, tail = _split(body, length)
    request = _json(head)
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise Refusal(400, f"'inputs' has to be a list of one tensor, named {INPUT!r}.")
    identity = request.get("id", "")
    if not isinstance(identity, str):
        raise Refusal(400, "'id' has to be a string.")
    binary = _binary_wanted(request)
    return Request(identity, contract.checked(_tensor(inputs[0], tail, contract)), binary)


def _split(body: bytes, length: str | None) -> tuple[bytes, memoryview | None]:
    if length is None:
        return body, None
    if not (length.isascii() and length.isdigit() and len(length) <= MOST_DIGITS) or int(length) > len(body):
        raise Refusal(400, f"{LENGTH_HEADER} has to be a number of bytes, at most the {len(body)} of the body.")
    return body[: int(length)], memoryview(body)[int(length) :]


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        raise Refusal(400, f"The request is not JSON: {reason}.") from None
    if not isinstance(found, dict):
        raise Refusal(400, "The request has to be a JSON object.")
    return found


def _parameters(holder: dict[str, Any]) -> dict[str, Any]:
    found = holder.get("parameters", {})
    if not isinstance(found, dict):
        raise Refusal(400, "'parameters' has to be an object.")
    return found


def _binary_wanted(request: dict[str, Any]) -> bool:
    wanted = _parameters(request).get("binary_data_output", False)
    outputs = request.get("outputs")
    if outputs is None:
        return wanted is True
    if not isinstance(outputs, list) or len(outputs) != 1 or not isinstance(outputs[0], dict):
        raise Refusal(400, f"'outputs' has to be a list of one tensor, named {OUTPUT!r}.")
    if outputs[0].get("name") != OUTPUT:
        raise Refusal(400, f"This model's one output is {OUTPUT!r}.")
    parameters = _parameters(outputs[0])
    if "classification" in parameters or "shared_memory_region" in parameters:
        raise Refusal(400, "Classification and shared memory are extensions that this server does not have.")
    return parameters.get("binary_data", wanted) is True


def _tensor(tensor: dict[str, Any], tail: memoryview | None, contract: Contract) -> NDArray[Any]:
    if tensor.get("name") != INPUT:
        raise Refusal(400, f"This model's one input is {INPUT!r}.")
    if tensor.get("datatype") != DATATYPE:
        raise Refusal(400, f"The input has datatype {str(tensor.get('datatype'))[:20]!r}; this model takes {DATATYPE}.")
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise Refusal(400, "'shape' has to be a list of whole numbers.")
    if shape[1:] != list(contract.shape):  # before anything of that size is made
        wanted = ", ".join(str(side) for side in contract.shape)
        raise Refusal(400, f"The input has shape {str(shape)[:60]}; this model takes [n, {wanted}].")
    size = _parameters(tensor).get("binary_data_size")
    values = _listed(tensor.get("data")) if size is None else _raw(size, tail)
    if values.size != math.prod(shape):
        raise Refusal(400, f"The input has {values.size} values, and its shape {str(shape)[:60]} another number.")
    if size is None and tail:
        raise Refusal(400, f"{len(tail)} bytes follow the JSON header, and no tensor says that they are its own.")
    return values.reshape(shape)


def _listed(data: Any) -> NDArray[Any]:
    if not isinstance(data, list):
        raise Refusal(400, "'data' has to be a list of numbers.")
    try:
        values: NDArray[Any] = np.asarray(data)
    except (ValueError, OverflowError, RecursionError):
        raise Refusal(400, "'data' is ragged; send one flat list, or lists nested as 'shape' says.") from None
    if values.dtype.kind not in "fiu":
        raise Refusal(400, "'data' has to hold numbers only.")
    return values.astype(np.float64, copy=False)


def _raw(size: Any, tail: memoryview | None) -> NDArray[Any]:
    there = 0 if tail is None else len(tail)
    if type(size) is not int or size != there or size % 4:
        raise Refusal(400, f"'binary_data_size' is {str(size)[:20]}, and {there} bytes follow the JSON header.")
    return np.frombuffer(tail if tail is not None else b"", "<f4")


def answer(request: Request, contract: Contract, version: int, logits: Floats) -> tuple[bytes, dict[str, str]]:
    """The body of the answer, and its headers.

    Args:
        request: that is answered.
        contract: of the model.
        version: that made the logits.
        logits: (n, C).
    """
    output: dict[str, Any] = {"name": OUTPUT, "datatype": DATATYPE, "shape": list(logits.shape)}
    found = {"model_name": contract.name, "model_version": str(version), "outputs": [output]}
    if request.id:
        found["id"] = request.id
    if not request.binary:
        output["data"] = logits.ravel().tolist()
        return json.dumps(found).encode(), {"Content-Type": "application/json"}
    raw = np.ascontiguousarray(logits, "<f4").tobytes()
    output["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps(found).encode()
    return head + raw, {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(head))}


def metadata(contract: Contract, versions: list[int]) -> dict[str, Any]:
    """What ``GET /v2/models/NAME`` says."""
    return {
        "name": contract.name,
        "versions": [str(version) for version in versions],
        "platform": "pytorch_eata",
        "inputs": [{"name": INPUT, "datatype": DATATYPE, "shape": [-1, *contract.shape]}],
        "outputs": [{"name": OUTPUT, "datatype": DATATYPE, "shape": [-1, len(contract.class_names)]}],
    }
