"""Models with quantized weights, loaded as they are stored, give what their numbers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.trees import leaves
from anydevice._llm.description import describe
from anydevice._llm.weights import Weights
from anydevice._machine.engines import registry
from anydevice._plan.config import read_config
from tests.comparing import assert_close
from tests.llm.families import TOKENS, whole_logits
from tests.llm.quantized_files import METHODS, write_folders
from tests.llm.random_weights import load_parameters

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "model_type": "llama"}
SIZES |= {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "dtype": "float32"}
ENGINES = ["numpy", "torch", "jax", "mlx", "opencl"]


def random_state() -> dict[str, Any]:
    """Return the tensors of a small Llama."""
    rng, hidden, inner = np.random.default_rng(5), 64, 96
    shapes = {"self_attn.q_proj": (64, hidden), "self_attn.k_proj": (32, hidden)}
    shapes |= {"self_attn.v_proj": (32, hidden), "self_attn.o_proj": (hidden, 64)}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    norms = ("input_layernorm", "post_attention_layernorm")
    state: dict[str, Any] = {"model.embed_tokens.weight": rng.normal(size=(97, hidden))}
    state |= {"lm_head.weight": rng.normal(size=(97, hidden)) / 8, "model.norm.weight": 1.0}
    for layer in range(2):
        for name, shape in shapes.items():
            state[f"model.layers.{layer}.{name}.weight"] = rng.normal(size=shape) / 8
        state |= {f"model.layers.{layer}.{name}.weight": 1.0 for name in norms}
    return {
        name: np.asarray(x if np.ndim(x) else np.ones(hidden), np.float32)
        for name, x in state.items()
    }


@pytest.fixture
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    return write_folders(tmp_path, SIZES, random_state(), request.param)


def logits(folder: Path, engine: str = "numpy", stored: bool = True) -> tuple[Any, Any]:
    """Return the logits of a text, and the parameters."""
    device = anydevice.device("opencl" if engine == "opencl" else "cpu", engine=engine)
    description = describe(read_config(folder))
    parameters = load_parameters(folder, description, device, weights=Weights(stored=stored))
    ids = registry.load(engine).place(np.arange(TOKENS, dtype="int32")[None] * 5 % 97, device)
    result = whole_logits(description, parameters, ids)
    return registry.load(engine).to_host(result), parameters


CASES = [(method, engine) for method in METHODS for engine in ("numpy", "torch")]
CASES += [(method, engine) for method in ("awq", "fp8") for engine in ("jax", "mlx", "opencl")]


@pytest.mark.parametrize(("folders", "engine"), CASES, indirect=["folders"])
def test_logits_are_those_of_the_dequantized_model(folders: Any, engine: str) -> None:
    quantized, floats = folders
    result, parameters = logits(quantized, engine)
    expected, plain = logits(floats)
    assert_close(result, expected, terms=2_000)
    weights = [x for x in leaves(parameters) if isinstance(x, QuantizedWeight)]
    assert len(weights) == 2 * 4
    assert all(not isinstance(x, QuantizedWeight) for x in leaves(plain))


@pytest.mark.parametrize("folders", METHODS, indirect=True)
def test_weights_are_unpacked_on_request(folders: Any) -> None:
    quantized, floats = folders
    result, parameters = logits(quantized, stored=False)
    assert not any(isinstance(x, QuantizedWeight) for x in leaves(parameters))
    assert_close(result, logits(floats)[0], terms=2_000)
