"""The decoder on a trained model: whole sequences and a cache, on every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice.core.trees import mapped
from anydevice.engines import registry
from anydevice.llm import decoder
from anydevice.llm.description import Description, describe
from anydevice.planning.config import read_config


def state_of(folder: Path) -> dict[str, Any]:
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, stop = entry["data_offsets"]
            flat = np.frombuffer(data[8 + size + first : 8 + size + stop], "<f4")
            found[name] = flat.reshape(entry["shape"])
    return found


def parameters_of(description: Description, state: dict[str, Any]) -> Any:
    def weight(name: str) -> Any:
        return {"weight": state[f"{name}.weight"]}

    def joined(name: str, *parts: str) -> Any:
        return {"weight": np.concatenate([state[f"{name}.{p}_proj.weight"] for p in parts])}

    layers = []
    for number in range(len(description.layers)):
        at = f"model.layers.{number}"
        layers.append(
            {
                "attention_norm": weight(f"{at}.input_layernorm"),
                "qkv": joined(f"{at}.self_attn", "q", "k", "v"),
                "output": weight(f"{at}.self_attn.o_proj"),
                "mlp_norm": weight(f"{at}.post_attention_layernorm"),
                "gate_up": joined(f"{at}.mlp", "gate", "up"),
                "down": weight(f"{at}.mlp.down_proj"),
            }
        )
    return {
        "embedding": state["model.embed_tokens.weight"],
        "layers": layers,
        "norm": weight("model.norm"),
    }


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "mlx", "opencl"])
def test_the_golden_text_greedily(stories: Path, name: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(stories / "tokenizer.json"))
    engine = registry.load(name)
    device = engine.devices()[0]
    description = describe(read_config(stories))

    def put(x: Any) -> Any:
        return engine.place(np.ascontiguousarray(x), device)

    parameters = mapped(put, parameters_of(description, state_of(stories)))
    cache = decoder.new_cache(description, 1, 64, parameters["embedding"])
    ids, count = [1], put(np.array([1], np.int32))
    for at in range(40):
        step = put(np.array([[ids[-1]]], np.int32)), put(np.array([at], np.int32)), count
        hidden, cache = decoder.forward(description, parameters, *step, cache, last=True)
        ids.append(int(engine.to_host(decoder.logits(description, parameters, hidden)).argmax()))
    golden = (stories / "golden.txt").read_text()
    text = tokenizer.decode(ids[1:])
    assert len(text) > 80
    assert golden.strip().startswith(text.strip())
    whole, _ = decoder.forward(description, parameters, put(np.array([ids[:-1]], np.int32)))
    best = engine.to_host(decoder.logits(description, parameters, whole))[0].argmax(-1)
    assert best.tolist() == ids[1:]
