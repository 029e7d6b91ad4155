"""The libraries that have modules, as data: a row for each kind of module.

The code of a library is in the folder of its engine, in files of the same names: `module` (how a
module is called, moved and verified), `step` (how it is trained), `mesh` (several processes and
devices), `pipeline`, `random`, `trees`, `trace`. A file is loaded when a value of that library
appears: nothing here imports a library that you have not.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from anydevice._core.hooks import is_loaded, is_of
from anydevice._core.record import Record


class ModuleRow(Record):
    """One kind of module: `module` has the class `Module`, `library` is the engine of its arrays.

    `adapter` is a class in `_libraries/<library>/module.py`, and `layer` a class in
    `_libraries/<library>/step.py`.
    """

    module: str
    library: str
    adapter: str
    layer: str


ROWS = (
    ModuleRow("torch.nn", "torch", "TorchAdapter", "TorchLayer"),
    ModuleRow("flax.nnx", "jax", "NnxAdapter", "NnxLayer"),
    ModuleRow("mlx.nn", "mlx", "MlxAdapter", "MlxLayer"),
    ModuleRow("equinox", "jax", "EquinoxAdapter", "EquinoxLayer"),
)


def row_of(model: object) -> ModuleRow | None:
    """Return the row of a module; `None` if `model` is no module of an imported library.

    A function made by `jax.vmap` of an Equinox module counts as a module.
    """
    row = next((row for row in ROWS if is_of(model, row.module, "Module")), None)
    if row is None and is_loaded("equinox") and part("jax", "module").mapped_module(model):
        return ROWS[-1]
    return row


def is_torch_module(model: object) -> bool:
    """Whether `model` is a module of PyTorch, which is moved and trained in place."""
    return is_of(model, "torch.nn", "Module")


@cache
def part(library: str, name: str) -> ModuleType:
    """Load a file of a library that is already imported, or that the user asked for.

    >>> part("numpy", "module")
    Traceback (most recent call last):
    ModuleNotFoundError: No module named 'anydevice._libraries.numpy'
    """
    return import_module(f"anydevice._libraries.{library}.{name}")
