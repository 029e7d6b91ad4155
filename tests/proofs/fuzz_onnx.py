"""Random ONNX models of every operator that proofs read; onnxruntime says which are legal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from math import sqrt
from random import Random
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, ValueInfoProto, defs, helper, numpy_helper

LARGEST = 400
"""The most elements of an operator's results."""
_NAMES = ("float32", "float64", "int32", "int64", "float16", "bool")
DTYPES = {np.dtype(name): helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in _NAMES}
_WAYS = ("tensor", "tensor", "tensor", "node", "list", "fill", "cast")
EXTREMES = (1e-45, 1e-40, 1e-20, 1e20, 1e30, -1e37, 3e38, -3e38, np.inf, -np.inf, np.nan)
INPUTS = {
    "Clip": (11, ("min", "max")),
    "Dropout": (12, ("ratio", "training_mode")),
    "Pad": (11, ("pads", "value", "axes")),
    "ReduceMean": (18, ("axes",)),
    "ReduceSum": (13, ("axes",)),
    "Slice": (10, ("starts", "ends", "axes", "steps")),
    "Split": (13, ("split",)),
    "Squeeze": (13, ("axes",)),
    "Unsqueeze": (13, ("axes",)),
}
"""Attributes that are inputs from an opset on."""
VERSIONS = {"Gelu": (20, 99), "HardSwish": (14, 99), "Mish": (18, 99), "Resize": (10, 99)}
VERSIONS |= {"Expand": (8, 99), "GroupNormalization": (21, 99)}
VERSIONS["Upsample"] = (7, 9)
"""The first and the last opset that have an operator."""


def open_model(model: Any) -> Callable[[Any], list[Any]]:
    """Return a function that runs an ONNX model in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return lambda x: list(session.run(None, {session.get_inputs()[0].name: x}))


def wrap_nodes(opset: int, shape: Sequence[Any], nodes: Any, outputs: Any, *others: Any) -> Any:
    given = [helper.make_tensor_value_info("x", others[0], shape)]
    results = [ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "random", given, results, *others[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@cache
def list_opsets() -> list[int]:
    """Return the opsets that proofs read and onnxruntime runs."""
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    runs = []
    for opset in range(7, defs.onnx_opset_version() + 1):
        with suppress(Exception):  # it has several errors for a version that it does not know
            open_model(wrap_nodes(opset, [1], relu, "y", TensorProto.FLOAT))
            runs.append(opset)
    return runs


class Draft(Random):
    """A model that grows by one operator after another; `values` are its tensors at one point."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.numbers, self.count = np.random.default_rng(seed), 0
        self.first = KINDS[seed % len(KINDS)]
        since, until = VERSIONS.get(self.first, (7, 99))
        self.opset = self.choice([k for k in list_opsets() if since <= k <= until])
        self.nodes, self.constants = list[Any](), list[Any]()
        image = [1, self.randint(1, 3), *self.draw_sizes(self.choice([1, 2, 2]), 3, 6)]
        shapes = [image, image, [1, self.randint(1, 6)], self.draw_sizes(self.randint(0, 5))]
        shape = image if self.first in WINDOWED else self.choice(shapes)
        shape = self.draw_sizes(3) if self.first in GATES else shape
        self.x = self.draw_point(shape, self.choices(list(DTYPES)[:5], (85, 10, 2, 2, 1))[0])
        self.values, self.computed, self.output = {"x": self.x}, ["x"], "x"

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def maybe(self, value: Any, probability: float = 0.4) -> Any:
        return value if self.chance(probability) else None

    def draw_sizes(self, count: int, low: int = 1, high: int = 3) -> list[int]:
        return [self.randint(low, high) for _ in range(count)]

    def draw_point(self, shape: Sequence[int], dtype: Any, scale: float = 2.0) -> Any:
        """Return random numbers, sometimes integers, of which some are equal, 0 or extreme."""
        numbers = scale * self.numbers.standard_normal(tuple(shape))
        round_them = self.chance(0.3) or np.dtype(dtype).kind != "f"
        numbers = np.asarray(np.round(numbers * 3) if round_them else numbers)
        if self.chance(0.05) and numbers.size and np.dtype(dtype).kind == "f":
            numbers.flat[self.randrange(numbers.size)] = self.choice(EXTREMES)
        with np.errstate(over="ignore"):
            return numbers.astype(dtype)

    def add_weight(self, shape: Sequence[int], value: Any, scale: float = 2.0) -> str:
        return self.add_constant(self.draw_point(shape, value.dtype, scale), value.dtype)

    def draw_operand(self, value: Any, computed: float = 0.3) -> str:
        """Return a computed tensor, or a constant that mostly broadcasts with a value."""
        others = [name for name in self.computed if self.values[name].dtype == value.dtype]
        if others and self.chance(computed):
            return self.choice(others)
        sizes = [1 if self.chance(0.3) else n for n in value.shape]
        sizes = sizes[self.randint(0, len(sizes)) :] if self.chance(0.6) else sizes
        sizes = [self.randint(1, 3) if n == 1 and self.chance(0.15) else n for n in sizes]
        sizes = [1, *sizes] if self.chance(0.1) else sizes
        return self.add_weight(sizes, value, self.choice([0.5, 2.0, 2.0, 50.0]))

    def add_node(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Append an operator and return its first output; `None` is no attribute."""
        since, names = INPUTS.get(kind, (99, ()))
        sources = list(inputs)
        for name in names if self.opset >= since else ():
            value = attributes.pop(name, None)
            dtype = np.int64 if isinstance(value, list) else self.values[inputs[0]].dtype
            dtype = np.bool_ if name == "training_mode" else dtype
            sources.append("" if value is None else self.add_constant(value, dtype))
        while sources and not sources[-1]:
            sources.pop()
        attributes = {key: x for key, x in attributes.items() if x not in (None, [])}
        results = [self.make_name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, sources, results, **attributes))
        return results[0]

    def make_name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def add_tensor(self, value: Any, dtype: Any) -> str:
        array, raw = np.asarray(value, dtype), self.chance(0.7)
        content = array.tobytes() if raw else array.reshape(-1)
        kind = DTYPES[array.dtype]
        self.constants.append(helper.make_tensor(self.make_name(), kind, array.shape, content, raw))
        return str(self.constants[-1].name)

    def add_constant(self, value: Any, dtype: Any) -> str:
        """Append a constant in one of the ways that files have."""
        array, way = np.asarray(value, dtype), self.choice(_WAYS)
        integers, small = array.dtype.kind == "i", bool((np.abs(array) < 1e6).all())
        if way == "fill" and array.size and np.ptp(array) == 0:
            value = numpy_helper.from_array(array.reshape(-1)[:1])
            return self.add_node(
                "ConstantOfShape", self.add_tensor(array.shape, np.int64), value=value
            )
        if way == "list" and array.dtype in (np.float32, np.int64) and array.ndim < 2:
            form = ("value_int" if integers else "value_float") + "s" * array.ndim
            return self.add_node("Constant", **{form: array.tolist()})
        if way == "node":
            return self.add_node("Constant", value=numpy_helper.from_array(array))
        if way == "cast" and small and array.dtype.kind in "if":
            other = self.choice(list(DTYPES)[:4])
            part = array + 0.4 * np.sign(array) if integers and other.kind == "f" else array
            return self.add_node("Cast", self.add_tensor(part, other), to=DTYPES[array.dtype])
        return self.add_tensor(array, dtype)

    def make_model(self, *outputs: str, symbolic: bool = False) -> Any:
        shape = ("N", *self.x.shape[1:]) if symbolic and self.x.shape[:1] == (1,) else self.x.shape
        kind = DTYPES[self.x.dtype]
        return wrap_nodes(self.opset, shape, self.nodes, outputs, kind, self.constants)

    def grow(self, kind: str) -> bool:
        """Append one operator, or a pattern; return whether onnxruntime runs the model then."""
        before, results = (len(self.nodes), len(self.constants)), []
        source = self.computed[-1] if self.chance(0.7) else self.choice(self.computed)
        try:
            PATTERNS.get(kind, propose_operator)(self, kind, source, self.values[source])
            made = [name for node in self.nodes[before[0] :] for name in node.output]
            results = open_model(self.make_model(*made))(self.x)
        except Exception:  # a shape that does not fit, or any of onnxruntime's reasons
            pass
        elements = [result.size for result in results] or [0]
        if min(elements) == 0 or sum(elements) > LARGEST:  # onnxruntime hangs on some empty tensors
            del self.nodes[before[0] :], self.constants[before[1] :]
            return False
        self.values |= dict(zip(made, results, strict=True))
        outputs = list(self.nodes[-1].output)
        self.output = self.choice(outputs)
        self.computed += [name for name in outputs if self.values[name].dtype in DTYPES]
        return True


def draw_axis(draft: Draft, value: Any) -> int:
    return draft.randrange(-value.ndim, value.ndim)


def draw_axes(draft: Draft, value: Any) -> list[int]:
    axes = draft.sample(range(value.ndim), draft.randint(0, value.ndim))
    return [axis - value.ndim * draft.chance(0.2) for axis in axes]


def draw_per_axis(low: int, high: int, count: int = 1) -> Callable[[Draft, Any], list[int]]:
    return lambda draft, value: draft.draw_sizes(count * (value.ndim - 2), low, high)


_WAY = "coordinate_transformation_mode"
REDUCED = {"axes": draw_axes, "keepdims": [0, 1], "noop_with_empty_axes": [0, 1]}
WINDOWS = {
    "auto_pad": ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"],
    "dilations": draw_per_axis(1, 2),
    "pads": draw_per_axis(0, 1, 2),
    "strides": draw_per_axis(1, 2),
}
GATES, WAYS = {"GRU": 3, "LSTM": 4, "RNN": 1}, ["forward", "reverse", "bidirectional"]
POOLED = {**WINDOWS, "kernel_shape": draw_per_axis(1, 3), "ceil_mode": [0, 0, 1]}
PLAIN = ("Abs", "Exp", "GlobalAveragePool", "Identity", "Neg", "Reciprocal", "Relu", "Sigmoid")
PLAIN += (
    "HardSwish",
    "Mish",
    "Softplus",
    "Add",
    "Concat",
    "Div",
    "Expand",
    "Gather",
    "MatMul",
    "Max",
    "Min",
    "Mul",
    "PRelu",
    "Pow",
    "Sub",
)
OPTIONS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in (*PLAIN, "Tanh")},
    "AveragePool": {**POOLED, "count_include_pad": [0, 1]},
    "BatchNormalization": {"epsilon": [1e-3, 0.5]},
    "Clip": {"min": [-1.0, -0.25, 0.5, -3.4e38], "max": [-0.5, 0.0, 1.0, 3.4e38]},
    "Conv": WINDOWS,
    "ConvTranspose": {**WINDOWS, "output_padding": draw_per_axis(0, 1)},
    "DepthToSpace": {"blocksize": [2], "mode": ["DCR", "CRD"]},
    "Dropout": {"ratio": [0.3], "training_mode": [False]},
    "Elu": {"alpha": [0.4, 1.7]},
    "Flatten": {"axis": draw_axis},
    "GRU": {"direction": WAYS},
    "Gelu": {"approximate": ["none", "none", "tanh"]},
    "Gemm": {"transA": [0, 1], "transB": [0, 1], "alpha": [1.0, 0.5], "beta": [1.0, 1.0, 0.0]},
    "HardSigmoid": {"alpha": [1 / 6, -0.3], "beta": [0.2, 0.9]},
    "GroupNormalization": {"epsilon": [1e-3, 0.5]},
    "InstanceNormalization": {"epsilon": [1e-3, 0.5]},
    "LSTM": {"direction": WAYS, "input_forget": [0, 0, 1]},
    "LeakyRelu": {"alpha": [0.3, 1.5, -0.5]},
    "MaxPool": {**POOLED, "storage_order": [0, 1]},
    "Pad": {"mode": ["constant", "edge", "reflect", "wrap"], "value": [0.0, 1.5, -3.0]},
    "RNN": {"direction": WAYS, "activations": [["Tanh"], ["Relu"] * 2, ["Relu"], ["Sigmoid"]]},
    "ReduceMean": REDUCED,
    "ReduceSum": REDUCED,
    "Reshape": {"allowzero": [0, 1]},
    "Resize": {
        "mode": ["nearest", "linear"],
        _WAY: ["half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners"],
        "nearest_mode": ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"],
        "cubic_coeff_a": [-0.75],
    },
    "Slice": {"axes": draw_axes},
    "Softmax": {"axis": draw_axis},
    "Split": {"axis": draw_axis, "num_outputs": [2, 3], "split": [[1, 1], [1, 2], [3, 1], [2]]},
    "Squeeze": {"axes": draw_axes},
    "Transpose": {"perm": lambda draft, value: draft.sample(range(value.ndim), value.ndim)},
    "Unsqueeze": {"axes": lambda draft, value: draft.choice([[0], [-1], [1], [2, 0], [1, -1]])},
    "Upsample": {"mode": ["nearest", "linear"]},
}
"""For each operator its attributes: their choices, or a function that draws one."""
WINDOWED = ("AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace")
WINDOWED += ("GlobalAveragePool", "GroupNormalization", "InstanceNormalization", "MaxPool")


def draw_options(draft: Draft, value: Any, choices: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, choice in choices.items():
        drawn = choice(draft, value) if callable(choice) else draft.choice(choice)
        options[name] = drawn if name == "kernel_shape" else draft.maybe(drawn)
    return options


def propose_operator(draft: Draft, kind: str, x: str, value: Any) -> str:
    """Append an operator with random attributes and operands."""
    options, others, outputs = draw_options(draft, value, OPTIONS[kind]), list[str](), 1
    match kind:
        case "Add" | "Div" | "Max" | "Min" | "Mul" | "Sub":
            extra = kind in ("Max", "Min") and draft.chance(0.3)
            others = [draft.draw_operand(value) for _ in range(1 + extra)]
            x, *others = draft.sample([x, *others], 2 + extra)
        case "PRelu":
            sizes = [n if draft.chance(0.6) else 1 for n in value.shape]  # it enlarges nothing
            others = [draft.add_weight(sizes[draft.randint(0, len(sizes)) :], value, 2.0)]
        case "Pow":
            exponent = np.full(draft.choice([(), (1,), (1, 1), (1,) * 5]), draft.choice([2, 2, 3]))
            others = [draft.add_constant(exponent, value.dtype)]
        case "BatchNormalization":
            others = [draft.add_weight(value.shape[1:2], value) for _ in range(3)]
            variance = np.abs(draft.draw_point(value.shape[1:2], value.dtype)) + value.dtype.type(
                0.1
            )
            others.append(draft.add_constant(variance, value.dtype))
        case "Concat":
            axis, shape = draw_axis(draft, value), list(value.shape)
            shape[axis] = draft.randint(1, 3)
            parts = [x, draft.add_weight(shape, value), draft.choice(draft.computed)]
            x, *others = draft.sample(parts, draft.randint(1, 3))
            options["axis"] = axis
        case "Conv":
            groups, channels = draft.choice([1, value.shape[1]]), value.shape[1]
            kernel = draft.draw_sizes(value.ndim - 2)
            shape = [groups * draft.randint(1, 2), channels // groups, *kernel]
            others = [draft.add_weight(size, value) for size in (shape, shape[:1])]
            others = others[: draft.randint(1, 2)]
            options |= {"group": groups, "kernel_shape": draft.maybe(kernel)}
        case "ConvTranspose":
            groups, kernel = draft.choice([1, value.shape[1]]), draft.draw_sizes(value.ndim - 2)
            shape = [value.shape[1], draft.randint(1, 2), *kernel]
            others = [draft.add_weight(size, value) for size in (shape, [groups * shape[1]])]
            others = others[: draft.randint(1, 2)]
            options |= {"group": groups, "kernel_shape": draft.maybe(kernel)}
        case "DepthToSpace":
            options["blocksize"] = 2
            x = draft.add_node("Concat", *[x] * 4, axis=1)
        case "Resize" | "Upsample":
            scales = [draft.choice([1.0, 1.0, 2.0, 3.0]) for _ in value.shape]
            scales[-1] = 1.5 if draft.chance(0.1) else scales[-1]
            if kind == "Resize" and draft.chance(0.5):
                options = {"mode": "nearest", _WAY: "asymmetric", "nearest_mode": "floor"}
            constant = draft.add_constant(scales, np.float32)
            others = [constant] if kind == "Upsample" or draft.opset < 11 else ["", constant]
            if draft.opset < 9:
                others, options = [], {"scales": scales, **options}
            if kind == "Resize" and draft.opset < 11:
                options = {"mode": options["mode"]}
            elif kind == "Resize":
                others[0] = "" if draft.opset > 12 else draft.add_constant([], np.float32)
                if draft.chance(0.4):
                    sizes = [n * draft.choice([1, 1, 2]) + draft.randint(0, 1) for n in value.shape]
                    empty = "" if draft.opset > 12 else draft.add_constant([], np.float32)
                    others = [others[0], empty, draft.add_constant(sizes, np.int64)]
        case "Expand":
            others = [
                draft.add_constant([draft.choice([1, 1, 2, n]) for n in value.shape], np.int64)
            ]
        case "GRU" | "LSTM" | "RNN":
            ways, size = 1 + (options["direction"] == "bidirectional"), draft.randint(1, 2)
            rows, options["hidden_size"] = GATES[kind] * size, size
            if kind == "GRU":
                options["linear_before_reset"] = draft.choice([0, 1, 1, 1, 1])
            shapes = [[ways, rows, value.shape[-1]], [ways, rows, size], [ways, 2 * rows]]
            others = [draft.add_weight(shape, value, 1.0) for shape in shapes]
            others = others[: draft.choice([2, 3, 3])]
            if len(others) == 3 and draft.chance(0.3):  # lengths, and the first state
                state = draft.choice([0.0, 0.0, 0.5]) * np.ones((ways, value.shape[1], size))
                others += ["", draft.add_constant(state, value.dtype)]
            outputs = draft.randint(1, 3 if kind == "LSTM" else 2)
        case "GroupNormalization" | "InstanceNormalization":
            channels = value.shape[1]
            if kind[0] == "G":
                options["num_groups"] = draft.choice([n for n in (1, 2, 3) if channels % n == 0])
            others = [draft.add_weight([channels], value) for _ in range(2)]
        case "Dropout" | "MaxPool":
            outputs += draft.chance(0.2)
        case "Gather":
            axis = draw_axis(draft, value)
            indices = draft.numbers.integers(
                -1, value.shape[axis], draft.draw_sizes(draft.randint(0, 2))
            )
            others, options["axis"] = (
                [draft.add_constant(indices, np.int64)],
                axis or draft.maybe(0),
            )
        case "Gemm":
            rows, inner = value.shape[:: -1 if options["transA"] else 1]
            width = draft.randint(1, 4)
            added = draft.choice([(), (1,), (width,), (1, width), (rows, 1), (rows, width)])
            shapes = ((inner, width)[:: -1 if options["transB"] else 1], added)
            others = [draft.add_weight(shape, value) for shape in shapes[: draft.choice([1, 2, 2])]]
        case "MatMul":
            swap, width = draft.chance(0.4), draft.randint(1, 4)
            inner = value.shape[-2 if swap and value.ndim > 1 else -1]
            matrix = [width, inner] if swap else [inner, width]
            shape = draft.choice([[inner], matrix, matrix, matrix, [2, *matrix]])
            x, *others = [x, draft.add_weight(shape, value)][:: -1 if swap else 1]
        case "Pad":
            options["axes"] = draft.maybe(draw_axes(draft, value), 0.2)
            count = 2 * len(options["axes"] or value.shape)
            options["pads"] = draft.draw_sizes(count, draft.choice([-1, 0, 0, 0]), 2)
        case "Reshape":
            sizes = draft.sample(value.shape, value.ndim)
            sizes[:2] = [sizes[0] * sizes[1]] if draft.chance(0.5) else sizes[:2]
            sizes.insert(draft.randint(0, len(sizes)), 1)
            sizes[draft.randrange(len(sizes))] = draft.choice([1, 1, 0, -1])
            others = [draft.add_constant(sizes, np.int64)]
        case "Slice":
            edges = [2**63 - 1, 1 - 2**63, 2**31 - 1, -(2**31), *range(-4, 5), *range(-4, 5)]
            count = len(options["axes"] or value.shape)
            for name in ("starts", "ends"):
                options[name] = [draft.choice(edges) for _ in range(count)]
            options["steps"] = draft.maybe([draft.choice([1, 2, -1, -2]) for _ in range(count)])
        case "Split":  # onnxruntime aborts if the numbers differ
            outputs = len(options["split"] or "") or options["num_outputs"] or draft.randint(1, 3)
            options["num_outputs"] = options["num_outputs"] and outputs
    return draft.add_node(kind, x, *others, outputs=outputs, **options)


def propose_activation(draft: Draft, kind: str, x: str, value: Any) -> str:
    """Write SiLU or GELU in parts, with shapes that may change on the way."""
    way, source = draft.choice(["Transpose", "Unsqueeze", "Reshape", "Slice"]), x
    if draft.chance(0.3):
        source = propose_operator(draft, way, x, value)
    if kind == "SiLU":
        return draft.add_node("Mul", *draft.sample([x, draft.add_node("Sigmoid", source)], 2))
    root, one, half = [
        draft.add_constant(np.full(draft.choice([(), (1,), (1, 1), (2, 1)]), number), value.dtype)
        for number in (sqrt(2), 1.0, 0.5)
    ]
    gate = draft.add_node("Add", draft.add_node("Erf", draft.add_node("Div", source, root)), one)
    factors = draft.sample([x, gate, half], 3)
    return draft.add_node("Mul", draft.add_node("Mul", *factors[:2]), factors[2])


def propose_shape(draft: Draft, kind: str, x: str, value: Any) -> str:
    """Reshape by a shape that was computed from that of a tensor, as exporters write it."""
    size = draft.add_node(
        "Shape", x, **draw_options(draft, value, {"start": draw_axis, "end": draw_axis})
    )
    if draft.chance(0.7):
        indices = draft.add_constant(draft.choice([[0], [-1], [0, -1]]), np.int64)
        size = draft.add_node("Gather", size, indices, axis=0)
    for _ in range(draft.randint(0, 2)):
        kind, dtype = draft.choice(["Mul", "Div", "Add", "Max"]), draft.choice(list(DTYPES)[:4])
        size = draft.add_node("Cast", size, to=DTYPES[dtype])
        size = draft.add_node(kind, size, draft.add_constant([draft.choice([1, 2, 3, -2])], dtype))
        size = draft.add_node("Cast", size, to=TensorProto.INT64)
    parts = draft.sample([size, draft.add_constant([-1], np.int64)], draft.randint(1, 2))
    return draft.add_node("Reshape", x, draft.add_node("Concat", *parts, axis=0))


def propose_cast(draft: Draft, kind: str, x: str, value: Any) -> str:
    """Convert to another dtype, mostly there and back, and amplify the difference."""
    y = draft.add_node("Cast", x, to=draft.choice(list(DTYPES.values())[: draft.choice([2, 2, 6])]))
    if draft.chance(0.7):
        y = draft.add_node("Cast", y, to=DTYPES[value.dtype])
        large = draft.add_constant([1e8], value.dtype)
        y = draft.add_node("Mul", draft.add_node("Sub", x, y), large) if draft.chance(0.5) else y
    return y


def propose_constants(draft: Draft, kind: str, x: str, value: Any) -> str:
    """Compute with constants alone, and add the result or multiply by it."""
    dtype = draft.choice([np.int32, np.int64, np.int64, np.float32])
    shape, large = draft.choice([(), (1,), value.shape[-1:]]), draft.choice([3, 3, 3, 2**30])
    kind = draft.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "Concat", "Neg", "Abs"])
    count = 1 if kind in ("Neg", "Abs") else 2
    names = [
        draft.add_constant(large * draft.draw_point(shape, np.int64), dtype) for _ in range(count)
    ]
    y = draft.add_node(kind, *names, axis=0 if kind == "Concat" else None)
    for way in (draft.choice([TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT]), None):
        if way is None or draft.chance(0.3):
            y = draft.add_node("Cast", y, to=way or DTYPES[value.dtype])
    return draft.add_node(draft.choice(["Add", "Mul"]), x, y)


PATTERNS = {
    "Cast": propose_cast,
    "Constants": propose_constants,
    "GELU": propose_activation,
    "Shape": propose_shape,
    "SiLU": propose_activation,
}
KINDS = [*OPTIONS, *PATTERNS]


def draw_model(seed: int) -> tuple[Any, list[Any]]:
    """Return a model of 1 to 5 random operators, and points of its input."""
    draft = Draft(seed)
    any(draft.grow(draft.first) for _ in range(20))
    operators = 0 if draft.chance(0.4) else draft.randint(1, 4)
    while operators > 0 or draft.output == "x":
        operators -= draft.grow(draft.choice(KINDS)) or draft.chance(0.1)
    shape, dtype = draft.x.shape, draft.x.dtype
    points = [draft.x]
    if dtype.kind == "f":  # integers may divide by 0
        points += [np.zeros(shape, dtype), np.ones(shape, dtype)]
        points += [draft.draw_point(shape, dtype, scale) for scale in (0.5, 3.0, 30.0)]
    points = [point for point in points if np.isfinite(point).all()] or [0 * draft.values["x"]]
    return draft.make_model(draft.output, symbolic=draft.chance(0.2)), points
