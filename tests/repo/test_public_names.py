"""The public names are these; adding or losing one is a decision, and changes this file."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import anydevice

NAMES = [
    *("__version__", "AnyDeviceError", "Compiled", "Config", "ConfigurationError", "Device"),
    *("DeviceMismatchError", "DeviceNotFoundError", "Finding", "MemoryEstimate", "MemoryStats"),
    *("OutOfMemoryError", "Reason", "Report", "TransferError", "UnsupportedError"),
    *("VerificationError", "benchmark", "compile", "configure", "cpu_fallback", "device"),
    *("device_of", "devices", "discover", "estimate_inference", "estimate_training"),
    *("find_batch_size", "load_weights", "memory_stats", "plan_inference", "plan_training"),
    *("prefer", "prefetch", "register_type", "release", "rng", "set_device", "synchronize"),
    *("to_device", "to_numpy", "use_device", "verify", "warm_up", "compat", "extend", "llm"),
    *("nn", "ops", "parallel", "proofs", "testing"),
]

SOURCE = Path(anydevice.__file__).parent


def test_the_public_names_are_pinned_and_say_what_they_are() -> None:
    assert sorted(anydevice.__all__) == sorted(NAMES)
    assert dir(anydevice) == sorted(NAMES)
    assert [name for name in NAMES[1:] if not inspect.getdoc(getattr(anydevice, name))] == []
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = anydevice.no_such_name
    public = {"compat", "extend", "llm", "nn", "ops", "parallel", "proofs", "testing"}
    modules = {path.stem for path in SOURCE.iterdir()} - public
    assert modules.isdisjoint(NAMES), "a module hides a public function"


@pytest.mark.parametrize("package", [anydevice.nn, anydevice.ops])
def test_no_module_of_a_package_hides_a_name_of_it(package: ModuleType) -> None:
    """Importing `nn/recompute.py` would put a module in the place of the function."""
    modules = {path.stem for path in Path(str(package.__file__)).parent.iterdir()}
    assert modules.isdisjoint(package.__all__)


DEPRECATED = [
    (anydevice.nn, "Moment", "TrainingEvent"),
    (anydevice.nn, "clipped", "clip_gradients"),
    (anydevice.nn, "folded", "fuse_loss"),
]
"""Names that are kept for one release: the module, the old name and the new one."""


@pytest.mark.parametrize(("module", "old", "new"), DEPRECATED, ids=lambda value: str(value))
def test_a_deprecated_name_warns_and_is_the_new_one(module: ModuleType, old: str, new: str) -> None:
    assert old not in module.__all__
    vars(module).pop(old, None)  # another test may have used it
    short = module.__name__.rpartition(".")[2]
    with pytest.warns(DeprecationWarning, match=rf"{short}\.{old} is now {short}\.{new}") as caught:
        first, second = getattr(module, old), getattr(module, old)
    assert first is second is getattr(module, new)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_type_checker_sees_every_public_name() -> None:
    """What loads on first use is imported where only a type checker looks, with its real type."""
    tree = ast.parse((SOURCE / "__init__.py").read_text("utf-8"))
    seen = {
        alias.asname
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == set(NAMES) - {"__version__"}
