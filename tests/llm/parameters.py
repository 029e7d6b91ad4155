"""The parameters of a decoder as a tree of arrays, without a model around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydevice._core.device import Device
from anydevice._formats.gguf import GgufFile
from anydevice._formats.load import load_joined
from anydevice._llm.description import Description
from anydevice._llm.weights import AS_STORED, Weights, plan_parameters, tree_of


def load_parameters(
    folder: str | Path | GgufFile,
    description: Description,
    device: Device,
    dtype: object = None,
    *,
    weights: Weights = AS_STORED,
) -> dict[str, Any]:
    """Load the parameters of a decoder onto a device, from a folder or a GGUF file."""
    return tree_of(load_joined(plan_parameters(folder, description, dtype, weights), device))
