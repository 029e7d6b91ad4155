"""Some of what is tested here runs in processes of its own."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.fixture
def eqx() -> Any:
    return pytest.importorskip("equinox")


@pytest.fixture
def eager_backend(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch traces a function as its compiler does, and writes no code for it."""
    torch.compiler.reset()
    plain, other = torch.compile, {"backend": "eager", "mode": None, "options": None}
    monkeypatch.setattr(torch, "compile", lambda f, **own: plain(f, **{**own, **other}))


@pytest.fixture(autouse=True)
def lines_of_children(children_count_lines: None) -> None:
    """Count the lines that they run."""
