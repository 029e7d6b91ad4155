"""Parameters of decoders from folders: joined on the way, checked before they are read."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydevice import device
from anydevice._core.device import Device
from anydevice._core.record import replace
from anydevice._core.trees import leaves
from anydevice._formats.gguf import GgufTensor
from anydevice._formats.safetensors import SafeTensor
from anydevice._llm.description import Description, describe
from anydevice._llm.weights import parameters_of
from anydevice._machine.engines import registry
from anydevice._plan.config import as_config, read_config
from anydevice.errors import TransferError, UnsupportedError
from tests.comparing import COPIED, EXACT, assert_close, assert_same_values
from tests.llm.families import BASE, CASES, random_model, whole_logits
from tests.llm.random_weights import load_parameters, random_parameters


def place(engine: str) -> Device:
    return device("opencl" if engine == "opencl" else "cpu", engine=engine)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "mlx", "opencl"])
def test_a_folder_becomes_parameters_of_each_engine(stories: Path, name: str) -> None:
    engine = registry.load(name)
    description = describe(read_config(stories))
    found = load_parameters(stories, description, place(name), "float32")
    state = load_file(stories / "model.safetensors")
    layer, theirs = found["layers"][3], "model.layers.3"
    joined = [state[f"{theirs}.self_attn.{each}_proj.weight"] for each in "qkv"]
    assert engine.owns(layer["qkv"]["weight"])
    assert_same_values(layer["qkv"]["weight"], np.concatenate(joined), because=COPIED)
    joined = [state[f"{theirs}.mlp.{each}_proj.weight"] for each in ("gate", "up")]
    assert_same_values(layer["gate_up"]["weight"], np.concatenate(joined), because=COPIED)
    assert set(found) == {"embedding", "layers", "norm"}
    assert len(found["layers"]) == len(description.layers)


@pytest.mark.needs("torch", "jax", "mlx")
def test_random_parameters_are_the_same_everywhere(stories: Path) -> None:
    description = describe(read_config(stories))
    found = {}
    for name in ("numpy", "torch", "jax", "mlx"):
        engine = registry.load(name)
        made = random_parameters(description, 3, place(name), "bfloat16")
        found[name] = engine.to_host(made["layers"][1]["gate_up"]["weight"]).astype("float32")
    first = found.pop("numpy")
    assert abs(first.std() * description.hidden**0.5 - 1) < 0.05
    assert len(np.unique(first)) > 500
    for other in found.values():
        assert_close(other, first, terms=4, dtype="bfloat16")


# --- files in all their ways ------------------------------------------------------------------


def test_beside_the_weights_there_is_one_tensor(tmp_path: Path) -> None:
    """Counted by NumPy's own allocations, in which everything lies here."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 256, "vocab_size": 300, "tie_word_embeddings": True}
    description = describe(as_config({"model_type": "llama", **sizes}))
    made = random_parameters(description, 1, place("numpy"), "float32")
    save(tmp_path, made, description)
    load_parameters(tmp_path, description, place("numpy"), "bfloat16")  # imports, once
    tracemalloc.start()
    found = load_parameters(tmp_path, description, place("numpy"), "bfloat16")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    weights = [x.nbytes for x in leaves(found)]
    assert peak < held + 2 * max(weights) + 300_000  # a chunk of it as stored is float32
    assert sum(weights) < held < 1.1 * sum(weights) + 300_000
    for a, b in zip(leaves(found), leaves(made), strict=True):
        assert_same_values(a, b.astype(a.dtype), because=EXACT)


def save(folder: Path, parameters: Any, description: Description, **changes: Any) -> None:
    """The first way to store each parameter, in one file."""
    state: dict[str, Any] = {}
    for each in parameters_of(description):
        array = parameters
        for key in each.path:
            array = array[key]
        at = 0
        for name, shape in each.ways[0].tensors:
            size = int(np.prod(shape))
            state[name] = array.reshape(-1)[at : at + size].reshape(shape).copy()
            at += size
    save_file(state | changes, folder / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "phi3", "glm4"]
)
def test_both_generations_of_files_are_the_same(tmp_path: Path, name: str) -> None:
    model, state = random_model(name)
    model.save_pretrained(tmp_path / "saved")  # as the family's own files are
    (tmp_path / "held").mkdir()  # as transformers holds it in memory
    shutil.copy(tmp_path / "saved" / "config.json", tmp_path / "held")
    save_file(state, tmp_path / "held" / "model.safetensors")
    names = [set(load_file(tmp_path / each / "model.safetensors")) for each in ("saved", "held")]
    assert (names[0] != names[1]) == (name not in ("gpt_oss", "phi3", "glm4"))
    description = describe(read_config(tmp_path / "saved"))
    first, second = (
        load_parameters(tmp_path / each, description, place("numpy")) for each in ("saved", "held")
    )
    assert len(leaves(first)) == len(leaves(second)) == len(list(parameters_of(description)))
    for a, b in zip(leaves(first), leaves(second), strict=True):
        assert_same_values(a, b, because=COPIED)


def test_interleaved_and_transposed_experts_are_put_in_order(tmp_path: Path) -> None:
    model, state = random_model("gpt_oss")
    model.save_pretrained(tmp_path)
    found = load_parameters(tmp_path, describe(read_config(tmp_path)), place("numpy"))
    experts, at = found["layers"][1]["experts"], "model.layers.1.mlp.experts"
    stored = state[f"{at}.gate_up_proj"]
    inner = stored.shape[2] // 2
    assert_same_values(experts["gate_up"][2, :inner], stored[2, :, 0::2].T, because=COPIED)
    assert_same_values(experts["gate_up"][2, inner:], stored[2, :, 1::2].T, because=COPIED)
    bias = state[f"{at}.gate_up_proj_bias"]
    apart = np.r_[bias[1, 0::2], bias[1, 1::2]]
    assert_same_values(experts["gate_up_bias"][1], apart, because=COPIED)
    assert_same_values(experts["down"][3], state[f"{at}.down_proj"][3].T, because=COPIED)


PREFIXES = {
    "with more than text": ("language_model.model.", "language_model.", "vision_tower."),
    "with more, newer": ("model.language_model.", "", "model.vision_tower."),
    "without a head": ("", "", "vision_tower."),
}


@pytest.mark.parametrize("kind", PREFIXES)
def test_the_decoder_of_a_larger_model(stories: Path, tmp_path: Path, kind: str) -> None:
    inner, outer, others = PREFIXES[kind]
    description = describe(read_config(stories))
    state = load_file(stories / "model.safetensors")
    changed = {f"{inner}{name.removeprefix('model.')}": x for name, x in state.items()}
    changed[f"{inner}layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    if inner:
        description = replace(description, tied=False)
        head = np.arange(512 * 64, dtype=np.float32).reshape(512, 64)
        changed[f"{others}patch.weight"] = np.zeros((3, 3), np.float32)
        changed[f"{outer}lm_head.weight"] = state["lm_head.weight"] = head
    (tmp_path / "plain").mkdir()
    save_file(state, tmp_path / "plain" / "model.safetensors")
    save_file(changed, tmp_path / "model.safetensors")
    first, second = (
        load_parameters(each, description, place("numpy"))
        for each in (tmp_path / "plain", tmp_path)
    )
    assert ("head" in second) == bool(inner)
    for a, b in zip(leaves(first), leaves(second), strict=True):
        assert_same_values(a, b, because=COPIED)


def test_layers_for_tokens_further_ahead_are_passed_over(stories: Path, tmp_path: Path) -> None:
    state = load_file(stories / "model.safetensors")
    ahead: dict[str, Any] = {"model.layers.5.eh_proj.weight": np.zeros((2, 2), np.float32)}
    ahead["model.layers.5.enorm.weight"] = np.zeros(2, np.float32)
    save_file(state | ahead, tmp_path / "model.safetensors")
    description = describe(read_config(stories))
    found = load_parameters(tmp_path, description, place("numpy"))
    assert len(found["layers"]) == 5


# --- what is wrong, found before anything is read ---------------------------------------------

Q = "model.layers.2.self_attn.q_proj.weight"


def without(state: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in state.items() if name != Q}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "missing": (without, TransferError, rf"{Q}.* is missing"),
    "left over": (
        lambda state: state | {"model.layers.2.self_attn.q_norm.weight": np.ones(8, np.float32)},
        TransferError,
        r"model\.safetensors: .* has no tensor .*q_norm",
    ),
    "too many layers": (
        lambda state: state | {"model.layers.5.mlp.up_proj.weight": np.ones((8, 2), np.float32)},
        TransferError,
        r"has no tensor .*layers\.5",
    ),
    "a bias": (
        lambda state: state | {Q.replace("weight", "bias"): np.ones(64, np.float32)},
        TransferError,
        r"has no tensor .*q_proj\.bias",
    ),
    "of another shape": (
        lambda state: state | {Q: np.ones((32, 64), np.float32)},
        TransferError,
        rf"model\.safetensors: .*{Q}.*\(32, 64\).*\(64, 64\)",
    ),
    "integers": (
        lambda state: state | {Q: np.ones((64, 64), np.int8)},
        UnsupportedError,
        rf"model\.safetensors: .*{Q}.* is int8, and no quantization_config",
    ),
    "8 bits": (
        lambda state: state | {Q: np.ones((64, 64), ml_dtypes.float8_e4m3fn)},
        UnsupportedError,
        rf"{Q}.* is float8_e4m3fn, and no quantization_config",
    ),
    "of no decoder": (lambda _: {"x": np.ones(2)}, TransferError, r"embed_tokens.* is missing"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_models(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    change, error, said = WRONG[kind]
    shutil.copy(stories / "config.json", tmp_path)
    save_file(change(load_file(stories / "model.safetensors")), tmp_path / "model.safetensors")
    refuse_reading(monkeypatch)
    with pytest.raises(error, match=said) as caught:
        load_parameters(tmp_path, describe(read_config(tmp_path)), place("numpy"))
    assert str(tmp_path) in str(caught.value)


def refuse_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafeTensor, "read", never)
    monkeypatch.setattr(GgufTensor, "read", never)


def test_a_missing_shard(stories: Path, tmp_path: Path) -> None:
    state = load_file(stories / "model.safetensors")
    shutil.copy(stories / "config.json", tmp_path)
    half = dict(list(state.items())[:20])
    save_file(half, tmp_path / "model-00001-of-00002.safetensors")
    files = {n: f"model-0000{1 if n in half else 2}-of-00002.safetensors" for n in state}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(TransferError, match=r"index.*1 of its 2 files.*model-00002-of-00002"):
        load_parameters(tmp_path, describe(read_config(tmp_path)), place("numpy"))


def test_of_several_files_the_one_with_the_usual_name(stories: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(stories / name, tmp_path)
    save_file({"tok_embeddings.weight": np.ones(2)}, tmp_path / "consolidated.safetensors")
    found = load_parameters(tmp_path, describe(read_config(tmp_path)), place("numpy"))
    assert len(found["layers"]) == 5


def test_shards_and_one_file_are_the_same(stories: Path, tmp_path: Path) -> None:
    state = load_file(stories / "model.safetensors")
    parts = [dict(list(state.items())[start::3]) for start in range(3)]  # layers are torn apart
    files: dict[str, str] = {}
    for number, part in enumerate(parts):
        save_file(part, tmp_path / f"{number}.safetensors")
        files |= dict.fromkeys(part, f"{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    description = describe(read_config(stories))
    first, second = (
        load_parameters(each, description, place("numpy"), "float16")
        for each in (stories, tmp_path)
    )
    for a, b in zip(leaves(first), leaves(second), strict=True):
        assert a.dtype == np.float16
        assert_same_values(a, b, because=COPIED)


def test_pickles_are_refused(stories: Path, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(TransferError, match=r"pytorch_model\.bin is a pickle.*Convert"):
        load_parameters(tmp_path, describe(read_config(stories)), place("numpy"))


@pytest.mark.parametrize("name", CASES)
def test_random_parameters_of_every_family_run(name: str) -> None:
    family, options = CASES[name]
    description = describe(as_config({"model_type": family, **BASE, **options}))
    parameters = random_parameters(description, 2, place("numpy"), "float32")
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    logits = whole_logits(description, parameters, ids)
    assert np.isfinite(logits).all()
    assert logits.std() > 1e-3


def test_another_seed_and_another_parameter_have_other_numbers(stories: Path) -> None:
    description = describe(read_config(stories))
    first, second = (random_parameters(description, seed, place("numpy")) for seed in (1, 2))
    assert abs(np.corrcoef(first["embedding"].flat, second["embedding"].flat)[0, 1]) < 0.05
    a, b = (first["layers"][n]["down"]["weight"].reshape(-1) for n in (0, 1))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.05
    rows = first["layers"][0]["down"]["weight"]
    assert np.abs(np.corrcoef(rows)[~np.eye(len(rows), dtype=bool)]).max() < 0.5
