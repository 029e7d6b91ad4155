"""What a PyTorch build was made for, read from its files."""

from __future__ import annotations

import ast
import mmap
import re
from functools import lru_cache
from pathlib import Path

from anydevice.core.record import Record

_LIBRARIES = ("libtorch_python.so", "torch_python.dll", "libtorch_python.dylib")
_ONE = rb"(?:sm_\d{2,3}[af]?|compute_\d{2,3}[af]?|gfx[0-9a-f]+(?:-[0-9a-z]+)*(?::[a-z0-9+-]+)*)"
_SEVERAL = re.compile(_ONE + rb"(?: " + _ONE + rb")+\x00")
_ALONE = re.compile(rb"\x00" + _ONE + rb"\x00")
# The list has no sure end on its left (in some builds another text runs into it), so several
# names in a row are looked for first, and a single one only where it stands by itself.
_MARKS = (
    (b" sm_", _SEVERAL),
    (b" gfx", _SEVERAL),
    (b" compute_", _SEVERAL),
    (b"\0sm_", _ALONE),
    (b"\0gfx", _ALONE),
)
_REACH = 1024


class TorchVersion(Record):
    """The contents of `torch/version.py`; `None` where a build leaves a backend out."""

    version: str
    cuda: str | None
    hip: str | None


def read_version(folder: Path) -> TorchVersion | None:
    """The version file of the PyTorch in `folder`; `None` where it has none that can be read."""
    try:
        module = ast.parse((folder / "version.py").read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    values = {}
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                values[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                values[name] = value
    version = values.get("__version__")
    if not isinstance(version, str):
        return None
    return TorchVersion(version, _text(values.get("cuda")), _text(values.get("hip")))


@lru_cache(maxsize=8)
def read_architectures(folder: Path) -> tuple[str, ...]:
    """The architectures compiled in, such as `("sm_80", "sm_90", "compute_90")`.

    Empty where the library or the list in it cannot be found: then nobody can tell.
    """
    for name in _LIBRARIES:
        try:
            with (
                (folder / "lib" / name).open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
            ):
                return _architectures_in(library)
        except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
            continue
    return ()


def _architectures_in(library: mmap.mmap) -> tuple[str, ...]:
    # A regular expression over the whole library takes a second; finding a mark, a few hundredths.
    for mark, pattern in _MARKS:
        at = library.find(mark)
        while at >= 0:
            match = pattern.search(library[max(0, at - _REACH) : at + _REACH])
            if match:
                return tuple(match[0].strip(b"\0").decode().split())
            at = library.find(mark, at + len(mark))
    return ()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
