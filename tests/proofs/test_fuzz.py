"""Random models, and ONNX's own tests, are read right or refused: never wrong, no bare error."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from anydevice._core.protocols import FixedTensor
from anydevice._libraries.registry import adapter_of
from anydevice._proofs import lowering
from anydevice._proofs.checking import operators
from anydevice._proofs.checking.network import FormatError, Network, NotSupportedError, Query
from anydevice._proofs.checking.operators import read_onnx
from anydevice._proofs.checking.readers import read_graph
from anydevice._proofs.evaluation import evaluate
from anydevice._proofs.execution import compare_reading
from anydevice._proofs.files import ModelFile
from anydevice._proofs.onnx_lowering import OnnxTrace
from anydevice.errors import ConfigurationError, UnsupportedError, VerificationError
from tests.proofs.fuzz_modules import draw_module

Reading = tuple[Network, bool]
Case = tuple[str, Callable[[], Reading], Any, Any]
"""A name, a function that reads a model, points, and the outputs of an execution there."""
SAMPLE = ("Clip", "Conv", "Gemm", "PRelu", "ReduceMean", "Reshape", "Slice", "Split", "Squeeze")
"""Operators whose node tests are small."""
MODULES = {"torch": 25, "nn": 25, "nnx": 5, "equinox": 5}
"""The number of random modules of each library."""
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def onnx() -> Any:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    return pytest.importorskip("onnx", reason="onnx is not installed")


def count_outcomes(cases: Iterator[Case]) -> Counter[str]:
    """Count models that are right or refused, print this, and fail with those that are wrong."""
    counts, wrong = Counter[str](), list[str]()
    for name, read, x, outputs in cases:
        try:
            counts["right" if compare_outputs(*read(), x, outputs) else "unknown"] += 1
        except (ConfigurationError, FormatError, NotSupportedError, UnsupportedError):
            counts["refused"] += 1
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
    print(dict(counts), f"and {len(wrong)} wrong")
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:9])
    return counts


@np.errstate(all="ignore")
def compare_outputs(network: Network, softmax: bool, x: Any, outputs: Any) -> bool:
    """Return whether outputs could be compared at some point; raise an error if some differ.

    The tolerance is twice the counted error of float32; it says nothing about numbers that
    overflow, or lie next to a pole.
    """
    x, outputs = (np.asarray(a, np.float64).reshape(len(x), -1) for a in (x, outputs))
    y, error = evaluate(network, x)
    assert y.shape == outputs.shape, f"{y.shape[1]} outputs instead of {outputs.shape[1]}"
    if softmax:
        powers = np.exp(y - y.max(1, keepdims=True))
        y, error = powers / powers.sum(1, keepdims=True), 2 * error.max(1, keepdims=True) + 1e-6
    known = (np.abs(y) < 1e30) & (error <= 1e-2 * (1 + np.abs(y)))
    wrong = known & ~(np.abs(outputs - y) <= 2 * error + 1e-12 * (1 + np.abs(y)))
    assert not wrong.any(), f"{y[wrong][:3]} instead of {outputs[wrong][:3]}"
    return bool(known.any())


def read_for_search(data: bytes) -> Reading:
    graph, (_, softmax) = read_graph(data), read_onnx(data)
    trace = OnnxTrace(graph)
    output = trace.tensors[graph.output]
    if isinstance(output, FixedTensor):
        raise UnsupportedError("an output that does not depend on the input")
    return trace.graph.network(output.cells), softmax


def read_and_execute(data: bytes) -> Reading:
    """Read a file as a proof does, which refuses it if the execution differs."""
    network, softmax = read_onnx(data)
    low, high = ((Fraction(end),) * network.inputs for end in (-1, 2))
    row = (Fraction(1),) * network.outputs
    query = Query(low, high, (row,), (Fraction(0),), (0,), (False,))
    try:
        compare_reading(ModelFile("random.onnx", "", network, softmax, data), [query])
    except VerificationError as error:
        raise UnsupportedError(str(error)) from error
    return network, softmax


SEEDS = range(300)


@pytest.mark.parametrize("read", [read_onnx, read_for_search, read_and_execute])
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(300, 6300), marks=soak)], ids=len)
def test_random_onnx_models_are_right_or_refused(seeds: Any, read: Any, onnx: Any) -> None:
    fuzz, kinds = import_module("tests.proofs.fuzz_onnx"), Counter[str]()

    def cases() -> Iterator[Case]:
        for seed in seeds:
            model, points = fuzz.draw_model(seed)
            run, data = fuzz.open_model(model), model.SerializeToString()
            kinds.update(node.op_type for node in model.graph.node)
            name = f"seed {seed}\n{onnx.printer.to_text(model)}"
            yield name, partial(read, data), points, [run(x)[0] for x in points]

    assert count_outcomes(cases())["right"] >= 0.65 * len(seeds)
    assert set(kinds) >= set(operators._OPERATORS), "operators that no model has"


@pytest.mark.parametrize(
    ("whole", "least"), [(False, 50), pytest.param(True, 180, marks=soak)], ids=["some", "all"]
)
def test_node_tests_of_onnx_are_right_or_refused(whole: bool, least: int, onnx: Any) -> None:
    node = import_module("onnx.backend.test.case.node")
    with warnings.catch_warnings(action="ignore"):
        for kind in SAMPLE:
            import_module(f"{node.__name__}.{kind.lower()}")
        if whole:
            node.collect_testcases()

    def cases() -> Iterator[Case]:
        """Yield each test for each of its float inputs; its other inputs become constants."""
        for case in node._NodeTestCases:
            inputs, outputs = case.data_sets[0]
            kinds = {operator.op_type for operator in case.model.graph.node}
            arrays = all(isinstance(x, np.ndarray) for x in inputs)
            if not arrays or not kinds <= set(operators._OPERATORS if whole else SAMPLE):
                continue
            for i, x in enumerate(inputs):
                model = onnx.ModelProto.FromString(case.model.SerializeToString())
                infos = list(model.graph.input)
                del model.graph.input[:], model.graph.output[1:]
                model.graph.input.append(infos[i])
                pairs = list(zip(infos, inputs, strict=True))
                model.graph.initializer.extend(
                    onnx.numpy_helper.from_array(array, info.name)
                    for info, array in pairs[:i] + pairs[i + 1 :]
                )
                if x.size and x.dtype in (np.float32, np.float64):
                    read = partial(read_onnx, model.SerializeToString())
                    yield f"{case.name} {i}", read, [x], [outputs[0]]

    assert count_outcomes(cases())["right"] >= least


@pytest.mark.parametrize("library", MODULES)
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=soak)])
def test_random_modules_are_right_or_refused(
    library: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = {"nnx": "flax", "nn": "numpy"}.get(library, library)
    pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setattr(lowering, "_check_agrees", lambda *_: None)  # it would hide a difference

    def read(module: Any, shape: tuple[int, ...]) -> Reading:
        return lowering.lower(module, shape).network, False

    def cases() -> Iterator[Case]:
        for seed in range(times * MODULES[library]):
            module, shape = draw_module(library, seed)
            call = module if library == "nn" else lowering.caller(adapter_of(module), shape)
            numbers = np.random.default_rng(seed)
            points = [k * numbers.standard_normal(shape) for k in (0, 0.5, 1, 3, 10)]
            outputs = [np.asarray(call(x[None].astype(np.float32))) for x in points]
            name = f"{library} {seed}, {shape}: {module}"
            yield name, partial(read, module, shape), np.float32(points), outputs

    assert count_outcomes(cases())["right"] >= 0.4 * times * MODULES[library]
