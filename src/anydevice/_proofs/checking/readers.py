"""Reads models in ONNX, without the onnx package, and properties in VNN-LIB 1.0 and 2.0.

This file has the format of ONNX alone: protocol buffers, tensors, and the graph; operators.py
lowers it. A property is a formula that inputs and bad outputs satisfy; its decimals are exact
rationals.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking.network import FormatError, NotSupportedError, Query

Array = np.ndarray[Any, Any]
Row = tuple[Counter[Any], bool]
"""A sum that must be <= 0 (< 0 if True): coefficients of ("X", 3) …, and of "", the constant."""
MAX_CASES, LARGEST, SECONDS = 20_000, 1 << 24, 60.0
_DTYPES = {1: ("<f4", 4), 6: ("<i4", 5), 7: ("<i8", 7), 9: ("?", 5), 11: ("<f8", 10)}
"""The dtypes of tensors, and the field for their numbers."""
_TOKEN = re.compile(r"(?a)[()]|;[^\n]*|[^\s()\[\];]*\[[^\[\]()]*\]|[^\s()\[\];]+|[\[\]]")
_NUMBER = re.compile(r"(?a)[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_VARIABLE = re.compile(r"(?a)([XY])(?:_(\d{1,8})|\[([\d\s,]{1,99})\])")


class Operator(NamedTuple):
    """A node of a graph; its attributes are messages."""

    kind: str
    inputs: list[str]
    outputs: list[str]
    attributes: Any

    def __str__(self) -> str:
        return f"the {self.kind} that gives {' '.join(self.outputs)!r}"


class Graph(NamedTuple):
    """A model: its operators in order, its constants, its input, and its output."""

    operators: list[Operator]
    constants: dict[str, Array]
    input: str
    shape: list[int]
    dtype: int
    output: str


@np.errstate(all="ignore")
def read_graph(data: bytes) -> Graph:
    """Read the graph in the content of an ONNX file."""
    try:
        model = message(data)
        graph = message(model[7][-1])
        constants = dict(map(tensor, graph[5]))
        if len(model[7]) > 1 or graph[15]:  # an execution merges graphs
            raise FormatError("it has several graphs, or sparse constants")
        if any(text(message(function)[10]) in ("", "ai.onnx") for function in model[25]):
            raise FormatError("it defines an operator of ONNX anew")
        inputs = [item for item in map(message, graph[11]) if text(item[1]) not in constants]
        outputs = [text(message(item)[1]) for item in graph[12]]
        if len(inputs) != 1 or len(outputs) != 1:
            raise FormatError(f"{len(inputs)} inputs and {len(outputs)} outputs, not one of each")
        versions = [message(o)[2] for o in model[8] if text(message(o)[1]) in ("", "ai.onnx")]
        if min(versions) < [7]:
            raise FormatError("its operators are older than version 7, which ran otherwise")
        kind = message(*message(*inputs[0][2])[1])
        sizes, dtype = message(*kind[2])[1], kind[1][-1]
        if dtype not in (1, 11):
            raise FormatError(f"its input is of dtype {dtype}, which is not float32 or float64")
        shape = [max(1, (message(size)[1] or [1])[-1]) for size in sizes]
        if prod(shape) > LARGEST or len(shape) > 8:
            raise FormatError(f"its input has the shape {shape}")
        operators = []
        for node in map(message, graph[1]):
            sources, results = ([text([name]) for name in node[k]] for k in (1, 2))
            domain = text(node[7]) if text(node[7]) != "ai.onnx" else ""
            name = text(node[4]) if not domain else f"{domain}.{text(node[4])}"
            operators.append(Operator(name, sources, results, node[5]))
        results = [name for operator in operators for name in operator.outputs if name]
        names = [text(message(item)[8]) for item in graph[5]] + [text(inputs[0][1])] + results
        if len(set(names)) < len(names):
            raise FormatError("two of its tensors have one name")
        return Graph(operators, constants, text(inputs[0][1]), shape, dtype, outputs[0])
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"it is no ONNX model, or damaged: {error}") from error


def message(data: Any) -> defaultdict[int, list[Any]]:
    """Return the contents of each field of a message, by its number.

    A key of fixed width is negative: the same field of another kind is another field, and parsers
    pass over it.
    """
    fields, at, data = defaultdict[int, list[Any]](list), 0, memoryview(data)
    while at < len(data):
        key, at = _varint(data, at)
        size = {1: 8, 5: 4}.get(key & 7, -1)
        if key & 7 in (0, 2):
            size, at = _varint(data, at)
        if not 8 <= key < 1 << 32 or (key & 7 and not 0 <= size <= len(data) - at):
            raise FormatError(f"field {key >> 3} of a message is cut or damaged")
        number = key >> 3 if key & 7 in (0, 2) else -key
        fields[number].append(data[at : at + size] if key & 7 else size)
        at += size if key & 7 else 0
    return fields


def _varint(data: Any, at: int) -> tuple[int, int]:
    """Return the signed number at an offset, and the offset behind it."""
    value = 0
    for k in range(10):
        value |= (data[at + k] & 127) << 7 * k
        if data[at + k] < 128:
            value &= (1 << 64) - 1
            return value - (value >> 63 << 64), at + k + 1
    raise FormatError("a number of a message has more than ten bytes")


def text(contents: list[Any]) -> str:
    """Return the last content of a field as a text, "" if there is none."""
    return str(contents[-1], "utf-8") if contents else ""


def integers(contents: list[Any]) -> Iterator[int]:
    """Yield a repeated field of integers, packed or not."""
    for part in contents:
        at = 0
        while not isinstance(part, int) and at < len(part):
            number, at = _varint(part, at)
            yield number
        if isinstance(part, int):
            yield part


def tensor(data: Any) -> tuple[str, Array]:
    """Return the name and the numbers of a tensor."""
    fields = message(data)
    name, shape = text(fields[8]), list(integers(fields[1]))
    if fields[2][-1] not in _DTYPES or fields[13] or fields[14] not in ([], [0]):
        raise FormatError(f"tensor {name!r} is of no dtype that is read, or in another file")
    dtype, field = _DTYPES[fields[2][-1]]
    if fields[9] or "f" in dtype:
        array = np.frombuffer(fields[9][-1] if fields[9] else b"".join(fields[field]), dtype)
    else:
        array = np.array(list(integers(fields[field])), dtype)
    if min(shape, default=0) < 0 or prod(shape) != array.size:
        raise FormatError(f"tensor {name!r} of shape {shape} has {array.size} numbers")
    return name, array.reshape(shape).astype(np.float64 if "f" in dtype else dtype[-2:])


def read_vnnlib(content: str) -> tuple[int, int, tuple[Query, ...]]:
    """Return the numbers of inputs and outputs in a VNN-LIB file, and its queries."""
    sizes: dict[str, Any] = {"X": (0,), "Y": (0,), "until": time.monotonic() + SECONDS}
    if re.search(r"\r(?!\n)|[\v\f\x1c-\x1e\x85\u2028\u2029]", content):
        raise FormatError("a line ends otherwise than with LF, and a comment may end there or not")
    words = (word for word in _TOKEN.findall(content) if word[0] != ";")
    lists = "".join({"(": "[", ")": "],"}.get(word) or f"{json.dumps(word)}," for word in words)
    common, cases, form = list[Row](), [list[Row]()], ["a list of forms in parentheses"]
    try:
        for form in json.loads(f"[{lists}]".replace(",]", "]")):
            if not isinstance(form[0], str):
                raise ValueError("a form that does not begin with a word")
            if form[0] == "assert":
                (condition,) = form[1:]
                new = _cases(condition, sizes)
                common += new[0] if len(new) == 1 else []
                cases = cases if len(new) == 1 else _both(cases, new)
            elif form[0] in ("declare-const", "declare-fun"):
                kind, number = str(form[1]).split("_")
                sizes[kind] = (max(int(number) + 1, *sizes[kind]),)
            elif form[0] == "declare-network":
                for declared in form[2:]:
                    kind = {"declare-input": "X", "declare-output": "Y"}[declared[0]]
                    if declared[2].lower() not in ("real", "float32", "float64"):
                        raise NotSupportedError(f"{kind} of dtype {declared[2]}")
                    if declared[1] != kind or sizes[kind] != (0,):
                        raise NotSupportedError("other names than one input X and one output Y")
                    sizes[kind] = tuple(map(int, re.findall(r"\d{1,8}", declared[3])))
            elif form not in (["vnnlib-version", "<1.0>"], ["vnnlib-version", "<2.0>"]):
                raise NotSupportedError("it is of another version, or unknown")
        form = ["the whole"]
        inputs, outputs = prod(sizes["X"]), prod(sizes["Y"])
        return inputs, outputs, tuple(_queries(common, cases, inputs, outputs, sizes["until"]))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        kind_of = NotSupportedError if isinstance(error, NotSupportedError) else FormatError
        place = re.sub(r"[\[\]',]+", "", str(form))[:80]
        raise kind_of(f"at {place!r}: {error}") from error


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise NotSupportedError(f"reading it takes more than {SECONDS:g} s")


def _both(a: list[list[Row]], b: list[list[Row]]) -> list[list[Row]]:
    if len(a) * len(b) > MAX_CASES and min(len(a), len(b)) > 1:  # more than stand in the file
        raise NotSupportedError(f"there are more than {MAX_CASES} cases")
    return [[*one, *other] for one, other in product(a, b)]


def _cases(form: Any, sizes: Any) -> list[list[Row]]:
    """Return a formula as cases, one of which must hold."""
    word, *parts = form
    if word == "or":
        return [case for part in parts for case in _cases(part, sizes)]
    if word == "and":
        cases: list[list[Row]] = [[]]
        for part in parts:
            cases = _both(cases, _cases(part, sizes))
        return cases
    left, right = (_linear(part, sizes) for part in parts)
    less, more = _sum(left, right, -1), _sum(right, left, -1)
    kinds = {"<=": [less], ">=": [more], "==": [less, more], "<": [less], ">": [more]}
    return [[(row, word in ("<", ">")) for row in kinds[word]]]


def _linear(form: Any, sizes: Any) -> Counter[Any]:
    """Return the coefficients of a term."""
    _check_time(sizes["until"])
    if not isinstance(form, str):
        word, (total, *terms) = form[0], [_linear(part, sizes) for part in form[1:]]
        if word == "*" and len(terms) == 1:
            factor, other = (total, terms[0]) if set(total) <= {""} else (terms[0], total)
            if not set(factor) <= {""}:
                raise NotSupportedError("a product of two variables")
            return _sum(Counter(), other, factor[""])
        for term in terms:
            total = _sum(total, term, {"+": 1, "-": -1}[word])
        return total if terms else _sum(Counter(), total, {"+": 1, "-": -1}[word])
    variable = _VARIABLE.fullmatch(form)
    if variable is None:
        if not _NUMBER.fullmatch(form):
            raise FormatError(f"{form!r} is neither a number nor a variable X or Y")
        return Counter({"": Fraction(form)})
    index, numbers = 0, [int(number) for number in (variable[2] or variable[3]).split(",")]
    for number, size in zip(numbers, sizes[variable[1]], strict=True):
        index = index * size + number
        if number >= size:
            raise FormatError(f"{form} was not declared")
    return Counter({(variable[1], index): Fraction(1)})


def _sum(a: Counter[Any], b: Counter[Any], factor: Any) -> Counter[Any]:
    total = Counter(a)
    total.update({variable: factor * coefficient for variable, coefficient in b.items()})
    return total


def _queries(common: Any, cases: Any, inputs: int, outputs: int, until: float) -> Iterator[Query]:
    if inputs * outputs == 0 or inputs + len(cases) * outputs > LARGEST or not cases:
        raise FormatError(f"{inputs} inputs X, {outputs} outputs Y and {len(cases)} cases")
    boxes: dict[Any, list[list[Row]]] = {}
    whole = _box(common, ((None,) * inputs,) * 2)
    for case in cases:
        _check_time(until)
        rows = [row for row in common + case if not _about(row, "X")]
        boxes.setdefault(_box(case, whole), []).append(rows or [(Counter(), False)])
    for (low, high), groups in boxes.items():
        for i, (a, b) in enumerate(zip(low, high, strict=True)):
            if a is None or b is None or a > b:
                raise FormatError(f"the interval of input X {i} is empty, or has no end")
        rows, table = [row for group in groups for row in group], list[tuple[Fraction, ...]]()
        for row, _ in rows:
            _check_time(until)
            table.append(tuple(Fraction(row["Y", k]) for k in range(outputs)))
        numbers = tuple(number for number, group in enumerate(groups) for _ in group)
        constants = tuple(Fraction(row[""]) for row, _ in rows)
        yield Query(low, high, tuple(table), constants, numbers, tuple(row[1] for row in rows))


def _about(row: Row, kind: str) -> list[Any]:
    return [variable for variable in row[0] if variable and variable[0] == kind]


def _box(rows: list[Row], box: Any) -> Any:
    """Return the box, narrowed by the rows that bound an input."""
    low, high = map(list, box)
    for row in (row for row in rows if _about(row, "X")):
        (variable, *others), (linear, strict) = _about(row, "X"), row
        if others or strict or _about(row, "Y") or not linear[variable]:
            raise NotSupportedError(f"a condition on X {variable[1]} is no <= with a number")
        edge, side = -Fraction(linear[""]) / linear[variable], linear[variable] > 0
        ends, best = ((low, max), (high, min))[side]
        ends[variable[1]] = edge if ends[variable[1]] is None else best(edge, ends[variable[1]])
    return tuple(low), tuple(high)
