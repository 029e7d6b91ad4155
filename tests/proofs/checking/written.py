"""Files of models and properties for tests, written without the packages that usually do it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from anydevice._proofs.checking.network import Network, Query


def field(number: int, content: bytes | str | int) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    data = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def tensor(name: str, numbers: np.ndarray) -> bytes:  # type: ignore[type-arg]
    kind = 1 if numbers.dtype.kind == "f" else 7
    raw = numbers.astype("<f4" if kind == 1 else "<i8").tobytes()
    shape = b"".join(field(1, size) for size in numbers.shape)
    return shape + field(2, kind) + field(8, name) + field(9, raw)


def operator(kind: str, inputs: Iterable[str], output: str, **attributes: int) -> bytes:
    data = b"".join(field(1, name) for name in inputs) + field(2, output) + field(4, kind)
    for name, value in attributes.items():
        data += field(5, field(1, name) + field(3, value) + field(20, 2))
    return data


def described(name: str, shape: Iterable[int]) -> bytes:
    sizes = b"".join(field(1, field(1, size)) for size in shape)
    return field(1, name) + field(2, field(1, field(1, 1) + field(2, sizes)))


def onnx_of(network: Network, gemm: bool = False) -> bytes:
    """An ONNX file of a chain of dense layers and ReLUs: MatMul and Add, or Gemm."""
    graph, last = field(2, "network"), "input"
    graph += field(1, operator("Flatten", [last], "flat", axis=1))
    last = "flat"
    for k, node in enumerate(network.nodes):
        names = [f"w{k}", f"b{k}", f"m{k}", f"a{k}", f"h{k}"]
        weight = node.weights[0] if gemm else node.weights[0].T
        graph += field(5, tensor(names[0], weight)) + field(5, tensor(names[1], node.bias))
        if gemm:
            graph += field(1, operator("Gemm", [last, *names[:2]], names[3], transB=1))
        else:
            graph += field(1, operator("MatMul", [last, names[0]], names[2]))
            graph += field(1, operator("Add", [names[2], names[1]], names[3]))
        last = names[3]
        if node.function:
            graph += field(1, operator("Relu", [last], names[4]))
            last = names[4]
    graph += field(11, described("input", (1, 1, network.inputs)))
    graph += field(12, described(last, (1, network.outputs)))
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


def vnnlib_of(query: Query, version: int = 1) -> str:
    """A VNN-LIB file of one query."""

    def variable(kind: str, number: int) -> str:
        return f"{kind}_{number}" if version == 1 else f"{kind}[0,{number}]"

    inputs, outputs = len(query.low), len(query.coefficients[0])
    if version == 1:
        lines = [f"(declare-const X_{k} Real)" for k in range(inputs)]
        lines += [f"(declare-const Y_{k} Real)" for k in range(outputs)]
    else:
        lines = ["(vnnlib-version <2.0>)", "(declare-network N"]
        lines += [f"  (declare-input X float32 [1, {inputs}])"]
        lines += [f"  (declare-output Y float32 [1, {outputs}])", ")"]
    for k, (low, high) in enumerate(zip(query.low, query.high, strict=True)):
        lines.append(f"(assert (>= {variable('X', k)} {float(low)!r}))")
        lines.append(f"(assert (<= {variable('X', k)} {float(high)!r}))")
    groups: dict[int, list[str]] = {}
    for row, constant, group in zip(query.coefficients, query.constants, query.group, strict=True):
        terms = [f"(* {float(c)!r} {variable('Y', k)})" for k, c in enumerate(row) if c]
        groups.setdefault(group, []).append(f"(<= (+ {' '.join(terms)} {float(constant)!r}) 0.0)")
    cases = [f"(and {' '.join(rows)})" for rows in groups.values()]
    return "\n".join([*lines, f"(assert (or {' '.join(cases)}))", ""])
