"""What `llm.load` refuses before it plans or reads, and what it takes from files beside weights."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import pickle
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydevice import device, llm, testing
from anydevice._llm.description import describe
from anydevice._llm.weights import MATRICES
from anydevice._plan.config import as_config
from anydevice._plan.families import ARCHITECTURES, ForwardSpec, ModelFamily
from anydevice._plan.plan import plan_inference
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.comparing import assert_close
from tests.llm.random_weights import random_parameters
from tests.programs import run_python


def changed(stories: Path, folder: Path, name: str, **values: Any) -> Path:
    """A copy of the model with other values in one of its files of JSON."""
    shutil.copytree(stories, folder)
    file = folder / name
    file.unlink()
    file.write_text(json.dumps({**json.loads((stories / name).read_text()), **values}))
    return folder


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "bool"])
def test_a_dtype_that_weights_cannot_have_is_refused(stories: Path, dtype: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"as {dtype}; its dtype is 'bfloat16'"):
        llm.load(stories, "cpu", dtype)


def test_an_unknown_family_is_refused_before_the_plan(stories: Path, tmp_path: Path) -> None:
    folder = changed(stories, tmp_path / "x", "config.json", model_type="gpt_neox")
    refused = pytest.raises(UnsupportedError, match=r"'gpt_neox' \(model_type\) cannot be run")
    with testing.fake_machine(cuda=1, memory="400MiB"), refused:  # where it would not fit either
        llm.load(folder, "cuda", context=512)


def test_drawing_has_a_temperature_of_1_by_default(stories: Path, tmp_path: Path) -> None:
    folder = changed(stories, tmp_path / "x", "generation_config.json", do_sample=True)
    model = llm.load(folder, "cpu")
    assert model.generation_defaults == {"temperature": 1.0}
    texts = {model.generate("", 20, seed=seed, **model.generation_defaults).text for seed in (1, 2)}
    assert len(texts) == 2
    assert llm.load(stories, "cpu").generation_defaults == {"temperature": 0.0}
    (folder / "generation_config.json").unlink()
    assert llm.load(folder, "cpu").generation_defaults == {}


@pytest.mark.needs("torch")
def test_torch_stores_matrices_with_short_rows_by_columns(stories: Path) -> None:
    model = llm.load(stories, device("cpu", engine="torch"))
    matrices = [layer[name]["weight"] for layer in model.parameters["layers"] for name in MATRICES]
    assert {matrix.stride()[0] for matrix in matrices} == {1}
    ids = model.generate("Once", 40, temperature=0).tokens
    expected = llm.load(stories, device("cpu", engine="numpy")).score(ids).logprobs
    assert_close(model.score(ids).logprobs, expected, terms=1_000, dtype="float32")


@pytest.mark.needs("jax")
def test_jax_on_a_cpu_warns_of_16_bits(stories: Path, recwarn: pytest.WarningsRecorder) -> None:
    for dtype in ("float32", "bfloat16"):
        llm.load(stories, device("cpu", engine="jax"), dtype)
    (warning,) = recwarn.list
    assert "JAX computes bfloat16 on a CPU in three times the time" in str(warning.message)


@pytest.fixture(scope="module")
def model(stories: Path) -> llm.LanguageModel:
    return llm.load(stories, device("cpu", engine="numpy"))


def test_numbers_of_numpy_are_numbers(model: llm.LanguageModel) -> None:
    drawn = model.generate("", 9, temperature=0.5, top_k=7, top_p=0.5, seed=3)
    numbers = {"temperature": np.float32(0.5), "top_k": np.int64(7), "top_p": np.float64(0.5)}
    assert model.generate("", np.int64(9), **numbers, seed=np.uint8(3)).tokens == drawn.tokens  # type: ignore[arg-type]


def test_no_stop_string_is_none(model: llm.LanguageModel) -> None:
    assert model.generate("", 9, stop=None).tokens == model.generate("", 9, stop=[]).tokens
    with pytest.raises(ConfigurationError, match="stop is a text or a list of texts, not 5"):
        model.generate("", stop=5)  # type: ignore[arg-type]


def test_a_stream_counts_time_from_its_first_read(model: llm.LanguageModel) -> None:
    model.generate("", 2)  # what is made once is made
    stream = model.stream("", 2)
    time.sleep(0.5)
    began = time.perf_counter()
    assert "".join(stream)
    assert stream.reply.speed.first_token <= time.perf_counter() - began


@pytest.mark.parametrize("doing", [copy.copy, copy.deepcopy, pickle.dumps])
def test_replies_alone_are_copied(model: llm.LanguageModel, doing: Callable[[Any], Any]) -> None:
    said = r"stories260K is on cpu, and cannot be copied or pickled: load it in each process"
    with pytest.raises(UnsupportedError, match=said):
        doing(model)
    reply = model.generate("", 3)
    found = doing(reply)
    assert (pickle.loads(found) if isinstance(found, bytes) else found) == reply


def test_generate_and_stream_take_the_same_options() -> None:
    replies, pieces = (
        dict(inspect.signature(each).parameters)
        for each in (llm.LanguageModel.generate, llm.LanguageModel.stream)
    )
    assert replies.pop("prompt").annotation != pieces.pop("prompt").annotation
    assert replies == pieces


def test_replies_and_scores_stay_within_the_plan(model: llm.LanguageModel) -> None:
    """By NumPy's own allocations: one cache, and the logits of a vocabulary that is large."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 1024, "vocab_size": 12000, "tie_word_embeddings": True}
    config = {"model_type": "llama", **sizes, "max_position_embeddings": 256}
    description, here = describe(as_config(config)), model.device
    plan = plan_inference(config, here, context=256, dtype="float32", prefill=512)
    parameters = random_parameters(description, 1, here, "float32")
    large = llm.LanguageModel(description, parameters, model.tokenizer, here, plan)
    text = [token * 7 for token in range(240)]
    expected = large.score(text).logprobs  # what is imported and made once is there
    large._executor.idle_runner(0, 0)
    gc.collect()
    tracemalloc.start()
    try:
        large.generate(text, 8)
        assert large.score(text).logprobs == pytest.approx(expected, abs=1e-5)
        peak = tracemalloc.get_traced_memory()[1] + plan.estimate.weights
    finally:
        tracemalloc.stop()
    assert 0.9 * plan.estimate.total < peak < 1.03 * plan.estimate.total


TOY = ModelFamily(
    keys={"hidden": "width", "layers": "depth", "heads": "queries", "kv_heads": "groups"},
    defaults={"tie_word_embeddings": True},
    forward=ForwardSpec(
        eps="tiny",
        tensor_names=(
            ("tokens.table", "model.embed_tokens.weight"),
            ("steps.", "model.layers."),
            (".mix.", ".self_attn."),
            (".think.", ".mlp."),
        ),
    ),
)


def test_a_row_is_a_family(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy with keys and names of its own is planned and run like the model that it renames."""
    folder = tmp_path / "toy"
    shutil.copytree(stories, folder)
    config = json.loads((stories / "config.json").read_text())
    renamed = {"hidden_size": "width", "num_hidden_layers": "depth", "rms_norm_eps": "tiny"}
    renamed |= {"num_attention_heads": "queries", "num_key_value_heads": "groups"}
    values = {renamed.get(key, key): value for key, value in config.items()}
    values |= {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(values))
    weights = next(folder.glob("*.safetensors"))
    state = {}
    for name, array in load_file(weights).items():
        for theirs, ours in TOY.forward.tensor_names:  # type: ignore[union-attr]
            name = name.replace(ours, theirs)
        state[name] = array
    weights.unlink()
    save_file(state, weights)

    with pytest.raises(UnsupportedError, match="'toy'"):
        llm.load(folder, "cpu")
    monkeypatch.setitem(ARCHITECTURES, "toy", TOY)
    expected, toy = llm.load(stories, "cpu"), llm.load(folder, "cpu")
    plans = [plan_inference(each, "cpu", context=64).estimate for each in (folder, stories)]
    assert plans[0].weights == plans[1].weights
    assert plans[0].kv_cache == plans[1].kv_cache
    assert toy.generate("Once upon", 20).text == expected.generate("Once upon", 20).text
    assert describe(as_config({**config, **values})).block == "pre"


def test_files_and_free_memory_are_read_in_each_load(stories: Path, tmp_path: Path) -> None:
    folder = changed(stories, tmp_path / "x", "config.json", max_position_embeddings=64)
    assert llm.load(folder, "cpu").context == 64
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 96}))
    (folder / "generation_config.json").unlink()
    again = llm.load(folder, "cpu")
    assert (again.context, again.generation_defaults) == (96, {})
    free = []
    for memory in ("900MiB", "2GiB"):
        with testing.fake_machine(cuda=1, memory=memory):
            free.append(llm.load(folder, "cuda").plan.free)
    assert free[0] < 2**30 < free[1]


STREAMING = """
import sys, threading
import anydevice
from anydevice import llm
from anydevice.errors import DeviceNotFoundError

def stream(model):
    next(model.stream("Once upon a time", 100))
    reached.release()
    while True:
        for _ in model.stream("Once upon a time", 100):
            pass

models, reached = [], threading.Semaphore(0)
for engine, backend in {"torch": "cpu", "jax": "cpu", "mlx": "cpu", "opencl": "opencl"}.items():
    try:
        models.append(llm.load(sys.argv[1], anydevice.device(backend, engine=engine)))
    except DeviceNotFoundError:
        pass
for model in models:
    threading.Thread(target=stream, args=(model,), daemon=True).start()
for _ in models:
    reached.acquire()
"""


def test_threads_that_stream_while_python_ends_end_quietly(stories: Path) -> None:
    """Python stops them where they return from a library, and C++ would abort the process."""
    ended = run_python("-c", STREAMING, str(stories))
    assert (ended.returncode, ended.stderr) == (0, "")
