"""Language models whose config, index, weights or GGUF file is damaged in thousands of ways.

Each is refused with an error of ours, or is loaded: then every parameter has the shape and the
numbers that the files hold, and the decoder runs. None takes memory beyond four times its files,
or seconds.
"""

from __future__ import annotations

import json
import random
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from anydevice import device
from anydevice._formats.gguf import read_gguf
from anydevice._llm import decoder
from anydevice._llm.description import describe
from anydevice._llm.tokenizer import Tokenizer
from anydevice._llm.weights import parameters_of
from anydevice._plan.config import as_config, read_config
from anydevice.errors import AnyDeviceError
from tests.comparing import assert_same_bits
from tests.faults.damage import (
    at_random,
    by_length,
    by_meaning,
    by_number,
    by_offset,
    by_value,
    content,
    cut_off,
    header_at_random,
    mostly_header,
)
from tests.llm.random_weights import load_parameters, random_parameters

CPU = device("cpu", engine="numpy")
SPARE = 3 * 2**20
"""Bytes for objects of the interpreter, whatever the size of the files."""
LONGEST = 10.0
"""Seconds."""

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
    | {"layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 1e4},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    "deepseek_v3": {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 12, "v_head_dim": 20, "n_routed_experts": 4, "n_group": 2}
    | {"topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
KEYS = [*SIZES, *(key for each in CONFIGS.values() for key in each), "model_type", "rope_scaling"]
KEYS += ["quantization_config", "text_config", "hidden_act", "architectures", "dtype", "factor"]

Damage = Callable[[random.Random, Path], None]


class Model:
    """A tiny model of random numbers: a folder of two shards, and its files as they were."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = folder
        config = {"model_type": family, **SIZES, **CONFIGS[family]}
        description = describe(as_config(config))
        state = state_of(random_parameters(description, 1, CPU, "float32"), description)
        names = list(state)
        shards = [names[: len(names) // 2], names[len(names) // 2 :]]
        files = {name: f"{number}.safetensors" for number in (0, 1) for name in shards[number]}
        self.files = {
            "config.json": json.dumps(config).encode(),
            "model.safetensors.index.json": json.dumps({"weight_map": files}).encode(),
        }
        for number, some in enumerate(shards):
            self.files[f"{number}.safetensors"] = stored({name: state[name] for name in some})

    def restore(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for name, raw in self.files.items():
            (self.folder / name).write_bytes(raw)


def state_of(parameters: Any, description: Any) -> dict[str, Any]:
    """Each parameter as the tensors of the first way to store it."""
    state: dict[str, Any] = {}
    for each in parameters_of(description):
        flat, start = at(parameters, each.path).reshape(-1), 0
        for name, shape in each.ways[0].tensors:
            size = int(np.prod(shape))
            state[name] = flat[start : start + size].reshape(shape)
            start += size
    return state


def at(parameters: Any, where: tuple[str | int, ...]) -> Any:
    for key in where:
        parameters = parameters[key]
    return parameters


def stored(state: dict[str, Any]) -> bytes:
    header, at = {}, 0
    for name, x in state.items():
        header[name] = {"dtype": "F32", "shape": x.shape, "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    return content(header, b"".join(x.tobytes() for x in state.values()))


# --- ways to damage a model -------------------------------------------------------------------


def values_of(name: str) -> Damage:
    def damage(dice: random.Random, folder: Path) -> None:
        tree = json.loads((folder / name).read_bytes())
        for _ in range(dice.choice([1, 1, 2, 3])):
            by_meaning(dice, tree, KEYS)
        (folder / name).write_text(json.dumps(tree))

    return damage


def bytes_of(name: str, way: Callable[[random.Random, bytes], bytes] = at_random) -> Damage:
    def damage(dice: random.Random, folder: Path) -> None:
        (folder / name).write_bytes(way(dice, (folder / name).read_bytes()))

    return damage


def no_file(dice: random.Random, folder: Path) -> None:
    dice.choice(sorted(folder.iterdir())).unlink()


INDEX = "model.safetensors.index.json"
WAYS: list[Damage] = [
    *(values_of("config.json"),) * 6,
    *(bytes_of("config.json"),) * 2,
    *(values_of(INDEX), bytes_of(INDEX)),
    *(bytes_of("1.safetensors", w) for w in (mostly_header, header_at_random, by_value)),
    *(bytes_of("0.safetensors", w) for w in (by_value, by_offset, by_length, cut_off)),
    no_file,
]


# --- the bar ----------------------------------------------------------------------------------


def bounded(attempt: Callable[[], bool], size: int) -> bool:
    """Whether something was loaded, within the limits of time and memory."""
    said = "what is said to be wrong, if anything"
    tracemalloc.start()
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = attempt()
    except AnyDeviceError as error:
        loaded, said = False, str(error)
    finally:
        taken = time.monotonic() - started
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert taken < LONGEST
    assert 20 < len(said) < 2000
    assert peak <= 4 * size + SPARE, f"{peak} bytes for files of {size}"
    return loaded


def independently_read(folder: Path) -> dict[str, Any]:
    index = json.loads((folder / INDEX).read_bytes()) if (folder / INDEX).exists() else {}
    names = set(index["weight_map"].values()) if index else {"0.safetensors", "1.safetensors"}
    found: dict[str, Any] = {}
    for name in names:
        if (folder / name).exists():
            found |= load((folder / name).read_bytes())
    return found


def load_and_run(path: Path) -> bool:
    """Load a model as `llm.load` does, and run it on a few tokens."""
    description = describe(read_config(path))
    parameters = load_parameters(path, description, CPU, "float32")
    files = {} if path.suffix else independently_read(path)
    for each in parameters_of(description):
        array = at(parameters, each.path)
        assert array.shape == each.shape
        names = [name for name, _ in each.ways[0].tensors]
        if files:
            there = [files[name].astype(np.float32).reshape(-1) for name in names]
            expected = np.concatenate(there).reshape(array.shape)
            assert_same_bits(array, expected, because="loading only copies")
    ids = np.array([[1, 2, 0]], np.int32) % description.vocabulary
    with np.errstate(all="ignore"):
        hidden, _ = decoder.forward(description, parameters, ids)
        logits = decoder.logits(description, parameters, hidden)
    assert logits.shape == (1, 3, description.vocabulary)
    return True


def load_damaged(
    damage: Callable[[int], tuple[Path, int]], load: Callable[[Path], bool], count: int
) -> None:
    """Load what `damage` makes for each number: a path, and the size of its files."""
    outcomes = []
    for number in range(count):
        path, size = damage(number)
        try:
            outcomes.append(bounded(lambda here=path: load(here), size))  # type: ignore[misc]
        except BaseException:
            found = {p.name: p.read_bytes()[:2000] for p in path.glob("*.json")}
            sys.stderr.write(f"mutation {number}: {found}\n")
            raise
    # A fuzzer that is always refused, or never, would find nothing.
    assert 0.05 < sum(outcomes) / count < 0.7


RUNS = [(1, 136), *(pytest.param(seed, 500, marks=pytest.mark.soak) for seed in range(2, 8))]
"""Seeds, and the number of damaged models; 3,000 of each kind in the long form."""


@pytest.mark.parametrize(("seed", "count"), RUNS)
def test_damaged_folders_are_refused_or_loaded(tmp_path: Path, seed: int, count: int) -> None:
    dice = random.Random(seed)
    models = [Model(tmp_path / family, family) for family in CONFIGS]

    def damage(number: int) -> tuple[Path, int]:
        model, way = models[number % len(models)], WAYS[number % len(WAYS)]
        model.restore()
        way(dice, model.folder)
        return model.folder, sum(file.stat().st_size for file in model.folder.iterdir())

    load_damaged(damage, load_and_run, count)


# --- GGUF -------------------------------------------------------------------------------------


def gguf_file(folder: Path) -> bytes:
    pytest.importorskip("gguf")
    from tests.llm.gguf_files import write
    from tests.llm.test_gguf import byte_level

    config = {"model_type": "llama", **SIZES, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    description = describe(as_config(config | {"vocab_size": 400}))
    state = state_of(random_parameters(description, 1, CPU, "float32"), description)
    numbers = {"context_length": 64, "block_count": 2, "embedding_length": 32}
    numbers |= {"feed_forward_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    numbers |= {"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 8}  # type: ignore[dict-item]
    tokenizer = byte_level("llama-bpe")
    path = write(
        folder / "sound.gguf",
        "llama",
        state,
        numbers,
        heads=(4, 2),
        tokenizer=tokenizer,
        packing="Q8_0",
    )
    return path.read_bytes()


def load_gguf(path: Path) -> bool:
    load_and_run(path)
    tokenizer = Tokenizer.from_gguf(read_gguf(path))
    tokenizer.decode(tokenizer.encode("It's 12 o'clock.<s>"))
    return True


@pytest.mark.parametrize(("seed", "count"), [(1, 84), *RUNS[1:]])
def test_damaged_gguf_files_are_refused_or_loaded(tmp_path: Path, seed: int, count: int) -> None:
    dice = random.Random(seed)
    raw = gguf_file(tmp_path)
    header = raw.index(b"output_norm.weight") + 100
    ways: list[Callable[[random.Random, bytes], bytes]] = [
        lambda dice, raw: by_number(dice, raw, header),
        lambda dice, raw: by_number(dice, raw, 900),
        lambda dice, raw: by_number(dice, raw[: len(raw)], len(raw)),
        lambda dice, raw: at_random(dice, raw, header),
        lambda dice, raw: at_random(dice, raw, 900),
        at_random,
        cut_off,
    ]
    path = tmp_path / "model.gguf"

    def damage(number: int) -> tuple[Path, int]:
        return path, path.write_bytes(ways[number % len(ways)](dice, raw))

    load_damaged(damage, load_gguf, count)
