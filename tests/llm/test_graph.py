"""Quantized models on a CPU as graphs of onnxruntime: right, chosen, and without copies."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import llm
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.trees import leaves
from anydevice._engines.quantized import dequantize, linear
from anydevice._formats.gguf import read_gguf
from anydevice._formats.quantize import quantizer_of
from anydevice.cli.main import main
from anydevice.errors import TransferError
from tests.comparing import assert_close, assert_same_integers
from tests.llm.families import CASES, TOKENS, Reference, reference_of, skip_unless_listed
from tests.llm.quantized_files import METHODS, write_folders
from tests.llm.test_quantize import with_tokenizer
from tests.llm.test_quantized import SIZES, random_state

pytest.importorskip("onnxruntime")
from anydevice._libraries.onnxruntime.graph import GraphMatrix, GraphWriter
from anydevice._libraries.onnxruntime.session import Session
from anydevice._llm.graph import DecoderGraph, GraphExecutor, refusal

CPU = anydevice.device("cpu", engine="numpy")
PROMPT = "Once upon a time"
PIECES = (7, 9)
PROMPTS = np.array([16, 5, 11])
"""The tokens of each row that are read in pieces; the others follow one by one."""
REFUSED = {
    "deepseek_v3": "latent attention",
    "deepseek_v3, yarn": "latent attention",
    "mixtral": "experts",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
    "gpt_oss": "experts",
    "ministral3": "scaled by their position",
    "llama, dynamic": "changes with each token",
}


class Weights:
    """The parameters of a decoder in memory, as a graph takes them."""

    def __init__(self, parameters: Any) -> None:
        self.plan: dict[Any, Any] = {}
        self._parameters = parameters

    def array(self, path: Any) -> Any:
        found = self._parameters
        for key in path:
            found = found[key]
        return np.asarray(found, np.float32)

    def matrices(self, path: Any) -> list[GraphMatrix]:
        array = self.array(path)
        return [GraphMatrix(*array.shape, None, lambda write: write(slice(None), array))]

    def rows(self, path: Any, numbers: Any) -> Any:
        return self.array(path)[numbers]


def executor_of(case: Reference) -> GraphExecutor:
    weights: Any = Weights(case.parameters)
    return GraphExecutor(case.description, weights, CPU, TOKENS + 3, 1)


def wide(name: str) -> Reference:
    """A case whose heads have sizes that graphs can rotate."""
    family, options = copy.deepcopy(CASES[name])
    more: dict[str, Any] = {"hidden_size": 128}
    if name == "phi3, longrope":
        rope = options["rope_parameters"]
        tables = {key: rope[key] * 4 for key in ("short_factor", "long_factor")}
        more["rope_parameters"] = rope | {k: v[:16] for k, v in tables.items()}
    if "head_dim" in options:
        more["head_dim"] = 32
    return reference_of(family, {**options, **more})


@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED.keys()))
def test_families_in_pieces_and_then_token_by_token(name: str) -> None:
    case = wide(name)
    run = executor_of(case)
    cache = run.new_cache(3, TOKENS + 3)
    found, read = np.full_like(case.logits, np.nan), np.zeros(3, np.int32)
    for tokens in (*PIECES, *[1] * (TOKENS - PROMPTS.min())):
        count = np.clip((PROMPTS if tokens > 1 else TOKENS) - read, 0, tokens)
        ids = np.full((3, tokens), 5, np.int32)
        for row in range(3):
            ids[row, : count[row]] = case.ids[row, read[row] : read[row] + count[row]]
        hidden = run.forward(ids, read, count, cache, length=np.full(3, TOKENS))
        for row in range(3):
            own = slice(read[row], read[row] + count[row])
            found[row, own] = run.logits(hidden[row, : count[row]])
        read += count
    assert np.abs(found - case.logits).max() <= 1e-4
    assert_same_integers(found.argmax(-1), case.logits.argmax(-1))


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_families_that_graphs_cannot_express(name: str, reason: str) -> None:
    assert reason in str(refusal(wide(name).description))


# --- products -----------------------------------------------------------------------------------


def product(x: Any, weight: QuantizedWeight, accuracy: int) -> Any:
    graph = GraphWriter(accuracy)
    matrix = GraphMatrix(*weight.shape, weight, lambda write: write(slice(None), weight))
    graph.input("x", ["rows", "tokens", x.shape[-1]])
    graph.output("y", ["rows", "tokens", weight.shape[0]], graph.product("x", [matrix]))
    y = np.empty((1, len(x), weight.shape[0]), np.float32)
    session = Session(graph, 1)
    session.release(graph)
    session.bind({"x": x[None]}, {"y": y})()
    return y[0]


@pytest.mark.parametrize("scheme", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q6_k"])
@pytest.mark.parametrize("rows", [1, 37])
def test_products_round_activations_alone(scheme: str, rows: int) -> None:
    """Each block of x to 8 bits: half a step of its largest number, for each product."""
    rng = np.random.default_rng(3)
    weight = quantizer_of(scheme)(rng.standard_normal((72, 512)).astype(np.float32))
    x = rng.standard_normal((rows, 512)).astype(np.float32)
    exact = linear(x.astype(np.float32), weight)
    step = np.abs(x.reshape(rows, -1, weight.block)).max(-1).repeat(weight.block, -1) / 127
    budget = (step / 2) @ np.abs(dequantize(weight)).T
    off = np.abs(product(x, weight, 4) - exact)
    assert (off <= 1.01 * budget + 1e-4).all()
    assert off.max() > 0
    assert_close(product(x, weight, 0), exact, terms=2_000)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux")
def test_originals_of_packed_weights_are_given_back() -> None:
    weight = quantizer_of("q4_0")(np.ones((4096, 256), np.float32))
    graph = GraphWriter()
    matrix = GraphMatrix(*weight.shape, weight, lambda write: write(slice(None), weight))
    graph.output("y", ["rows", 4096], graph.product(graph.input("x", ["rows", 256]), [matrix]))
    session = Session(graph, 1)
    scales = list(session._packed.arrays.values())[-1]
    assert scales.all()
    session.release(graph)
    assert not scales.any()  # neither the process nor the system has them


def test_a_head_with_minimums() -> None:
    case, found = wide("llama 2"), list[Any]()
    weights: Any = Weights(case.parameters)
    stored = quantizer_of("q4_1")(weights.array(("head", "weight")))
    x = np.random.default_rng(7).standard_normal((1, 3, 128)).astype(np.float32)
    for rows, like in ((stored, stored), (dequantize(stored), None)):
        matrix = GraphMatrix(*stored.shape, like, lambda write, rows=rows: write(slice(None), rows))
        weights.matrices = lambda path, matrix=matrix: [matrix]
        found.append(np.empty((1, 3, stored.shape[0]), np.float32))
        writer = DecoderGraph(case.description, weights)
        writer.graph = GraphWriter(0)
        Session(writer.head(), 1).bind({"x": x}, {"y": found[-1]})()
    assert_close(*found, terms=2_000)


# --- models -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama in Q4_0."""
    folder = tmp_path_factory.mktemp("quantized")
    floats = write_folders(folder, SIZES, random_state(), "gptq")[1]
    return llm.quantize(with_tokenizer(floats), folder / "small.gguf", "q4_0").path


def test_a_quantized_model_is_as_good_as_its_numbers(file: Path) -> None:
    model, floats = llm.load(file, "cpu"), llm.load(file, CPU, weights="float")
    assert (model.executor, floats.executor) == ("onnxruntime", "numpy")
    assert "(onnxruntime)" in repr(model)
    ids = [7 * number % 97 for number in range(1, 60)]
    score, exact = model.score(ids), floats.score(ids)
    assert score.perplexity == pytest.approx(exact.perplexity, rel=0.005)
    np.testing.assert_allclose(score.logprobs, exact.logprobs, atol=0.2)
    replies = model.generate([PROMPT, "One day"], 8)
    alone = [model.generate(prompt, 8) for prompt in (PROMPT, "One day")]
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in alone]
    leaf = leaves(model.parameters)[0]
    assert_close(dequantized(leaf), dequantized(leaves(floats.parameters)[0]), terms=2)


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_folder_is_as_good_as_its_numbers(method: str, tmp_path: Path) -> None:
    """By an engine instead, for levels and blocks that onnxruntime does not multiply."""
    folder = with_tokenizer(write_folders(tmp_path, SIZES, random_state(), method)[0])
    model, exact = llm.load(folder, "cpu"), llm.load(folder, "cpu", activations="exact")
    ids = [7 * number % 97 for number in range(1, 60)]
    assert model.score(ids).perplexity == pytest.approx(exact.score(ids).perplexity, rel=0.01)


def dequantized(x: Any) -> Any:
    return dequantize(x) if isinstance(x, QuantizedWeight) else x


def test_exact_activations_give_the_same_text_on_every_engine(file: Path) -> None:
    texts = {}
    for engine in ("numpy", "torch", "jax", "mlx", "opencl"):
        place = "opencl" if engine == "opencl" else "cpu"
        try:
            device = anydevice.device(place, engine=engine)
        except anydevice.AnyDeviceError as error:
            skip_unless_listed(engine, error)
        model = llm.load(file, device, "float32", activations="exact")
        assert model.executor == engine
        texts[engine] = model.generate(PROMPT, 40, temperature=0.8, top_p=0.95, seed=3).text
    assert len(set(texts.values())) == 1, texts
    assert llm.load(file, "cpu", activations="exact").executor != "onnxruntime"


def test_an_engine_that_is_named_is_obeyed(file: Path) -> None:
    for engine in ("torch", "numpy"):
        model = llm.load(file, anydevice.device("cpu", engine=engine))
        assert model.executor == model.device.engine == engine


def test_without_onnxruntime_the_op_computes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.load(file, "cpu").generate(PROMPT, 12).text
    for name in [name for name in sys.modules if re.search(r"onnxruntime|_llm\.graph$", name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = llm.load(file, "cpu")
    assert model.executor == model.device.engine != "onnxruntime"
    assert model.generate(PROMPT, 12).text == expected


def test_commands_name_the_executor(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["chat", str(file), "--device", "cpu", "--prompt", PROMPT, "--max-tokens", "3"]
    assert main(command) == 0
    assert "On cpu with onnxruntime, because" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["executor"] == "onnxruntime"


def damaged(file: Path, at: int, data: bytes) -> Path:
    """Return a copy of a file with other bytes behind the name of a tensor, or in the tensor."""
    contents = bytearray(file.read_bytes())
    contents[at : at + len(data)] = data
    copied = file.with_name("damaged.gguf")
    copied.write_bytes(contents)
    return copied


NAME = "blk.1.ffn_up.weight"


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_scales_that_are_not_finite(file: Path, number: float, monkeypatch: Any) -> None:
    monkeypatch.delattr("anydevice._llm.model.load_joined")  # arrays are not made before the error
    monkeypatch.delattr("anydevice._llm.model._session_executor")
    tensor = read_gguf(file).tensors[NAME]
    at = tensor.start + 5 * tensor.packing.bytes
    copied = damaged(file, at, np.float16(number).tobytes())
    for device in ("cpu", CPU):
        with pytest.raises(TransferError, match=rf"damaged\.gguf.*{NAME}.*NaN or infinite"):
            llm.load(copied, device)


def test_a_file_that_ends_inside_a_block(file: Path) -> None:
    copied = file.with_name("damaged.gguf")
    copied.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(TransferError, match=r"damaged\.gguf.*ends behind the end of the file"):
        llm.load(copied, "cpu")


@pytest.mark.parametrize(
    ("offset", "data", "said"),
    [
        (4, (50).to_bytes(8, "little"), "cannot be"),  # columns that are not whole blocks
        (20, (5).to_bytes(4, "little"), "type number 5, which is not read"),
        (20, (2**32 - 1).to_bytes(4, "little"), "type number 4294967295, which is not read"),
    ],
)
def test_a_tensor_that_cannot_be(file: Path, offset: int, data: bytes, said: str) -> None:
    at = file.read_bytes().index(NAME.encode()) + len(NAME) + offset
    with pytest.raises(TransferError, match=rf"damaged\.gguf.*{NAME}.*{said}"):
        llm.load(damaged(file, at, data), "cpu")
