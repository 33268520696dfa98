"""What the OpenAPI document says of bodies and errors."""

from __future__ import annotations

from typing import Any

from eata.serve.contract import DATATYPE, INPUT, OUTPUT, Contract

ERROR = {
    "content": {
        "application/json": {
            "schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
        }
    }
}
MEANINGS = {
    400: "The request is wrong; nothing was learnt from it.",
    401: "The token is missing or wrong.",
    403: "Not allowed.",
    404: "Unknown model or version.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is of a kind that is not taken.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The model failed.",
    503: "The server is stopping.",
    504: "The model was busy for too long; nothing was learnt.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of an endpoint."""
    return {status: {"description": MEANINGS[status], **ERROR} for status in statuses}


def infer(contract: Contract) -> dict[str, Any]:
    """The body of an inference request."""
    sides = [{"const": side} for side in contract.shape]
    shape = {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 1, "maximum": contract.batch}, *sides],
        "minItems": 1 + len(sides),
        "maxItems": 1 + len(sides),
    }
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"const": INPUT},
            "shape": shape,
            "datatype": {"const": DATATYPE},
            "data": {"type": "array", "items": {}, "description": "numbers, flat or nested as the shape says"},
            "parameters": {"type": "object"},
        },
    }
    body = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object", "properties": {"binary_data_output": {"type": "boolean"}}},
            "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": tensor},
            "outputs": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1,
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"const": OUTPUT}}},
            },
        },
    }
    kinds = {"application/json": {"schema": body}, "application/octet-stream": {"schema": {"type": "string"}}}
    return {"requestBody": {"required": True, "content": kinds}}


def files() -> dict[str, Any]:
    """The body of ``/predict``."""
    each = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
    form = {"type": "object", "required": ["files"], "properties": {"files": each}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


def rollback() -> dict[str, Any]:
    """The body of a rollback."""
    body = {"type": "object", "required": ["version"], "properties": {"version": {"type": "integer", "minimum": 0}}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
