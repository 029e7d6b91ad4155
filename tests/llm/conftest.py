"""What several tests of language models need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data(name: str) -> Path:
    """A folder of data that is beside the project and not in it; the test is skipped without it."""
    root = Path(os.environ.get("ANYDEVICE_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (root / name).is_dir():
        pytest.skip(f"there is no {root / name}; ANYDEVICE_DATA names another folder of data")
    return root / name


@pytest.fixture(scope="session")
def stories() -> Path:
    """The folder of stories260K, a small trained language model of Llama's family."""
    return data("stories260K")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2, a real language model with a byte-level vocabulary."""
    file = Path(__file__).parents[2] / ".cache/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        pytest.skip(f"there is no {file}; make chat fetches it")
    return file
