"""The decoder on a trained model: whole sequences and a cache, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import device
from anydevice.engines import registry
from anydevice.llm import decoder
from anydevice.llm.description import describe
from anydevice.llm.weights import load_parameters
from anydevice.planning.config import read_config


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "mlx", "opencl"])
def test_the_golden_text_greedily(stories: Path, name: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(stories / "tokenizer.json"))
    engine = registry.load(name)
    place = engine.devices()[0]
    description = describe(read_config(stories))

    def put(x: Any) -> Any:
        return engine.place(np.array(x, np.int32), place)

    parameters = load_parameters(stories, description, device(str(place), engine=name))
    cache: Any = decoder.new_cache(description, 1, 64, parameters["embedding"])
    ids = [1]
    for at in range(40):
        step = put([[ids[-1]]]), put([at]), put([1])
        hidden, cache = decoder.forward(description, parameters, *step, cache, last=True)
        ids.append(int(engine.to_host(decoder.logits(description, parameters, hidden)).argmax()))
    golden = (stories / "golden.txt").read_text()
    text = tokenizer.decode(ids[1:])
    assert len(text) > 80
    assert golden.strip().startswith(text.strip())
    whole, _ = decoder.forward(description, parameters, put([ids[:-1]]))
    best = engine.to_host(decoder.logits(description, parameters, whole))[0].argmax(-1)
    assert best.tolist() == ids[1:]
