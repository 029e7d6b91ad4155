"""Importing anydevice, and looking at the machine, leave the process as light as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import output_of

ARRAY_LIBRARIES = ("numpy", "torch", "jax", "jaxlib", "mlx", "cupy", "pyopencl", "ml_dtypes")
HEAVY = (*ARRAY_LIBRARIES, "rich", "tomlkit", "psutil", "pynvml", "platformdirs")


def run(code: str, tmp_path: Path) -> str:
    """What `code` printed in an interpreter of its own, in which warnings are errors."""
    variables = {"ANYDEVICE_HOME": str(tmp_path)}
    return output_of("-W", "error", "-c", code, cwd=tmp_path, env=variables)


def loaded_after(statements: str, names: tuple[str, ...], tmp_path: Path) -> str:
    return run(f"import sys\n{statements}\nprint(*set({names!r}) & set(sys.modules))", tmp_path)


def test_importing_anydevice_imports_nothing_heavy(tmp_path: Path) -> None:
    assert loaded_after("import numpy", HEAVY, tmp_path).split() == ["numpy"], "it is noticed"
    assert loaded_after("import anydevice", HEAVY, tmp_path).strip() == ""


@pytest.mark.parametrize(
    "statement",
    [
        "anydevice.discover()",
        "anydevice.devices()",
        "anydevice.device('cpu')",
        "str(anydevice.discover())",
        "anydevice.Device('cuda:3').usable",
    ],
)
def test_looking_at_the_machine_imports_no_array_library(statement: str, tmp_path: Path) -> None:
    loaded = loaded_after(f"import anydevice\n{statement}", ARRAY_LIBRARIES, tmp_path)
    assert loaded.strip() == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_discovers_too_and_no_thread_is_left(tmp_path: Path) -> None:
    said = run(
        """
import os, threading, anydevice
anydevice.discover()
anydevice.device("cpu")
print("threads", threading.active_count(), flush=True)
child = os.fork()
if child == 0:
    code = 9
    try:
        report = anydevice.discover(refresh=True)
        assert report["cpu"].usable
        assert str(anydevice.device("cpu")) == "cpu"
        print("threads", threading.active_count(), flush=True)
        code = 0
    finally:
        os._exit(code)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
        tmp_path,
    )
    assert said.splitlines() == ["threads 1", "threads 1", "child 0"]
