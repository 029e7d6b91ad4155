"""Whether two settings are the same ones, when one of them was written down by another process."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import types
from typing import Any

from anydevice.core.record import Record, as_dict
from anydevice.nn.recomputing import Recomputed

_PLAIN = (bool, int, float, str, type(None))
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_CODE = f"code of Python {sys.version_info[0]}.{sys.version_info[1]}"
"""Where the code of a function without a name is told: it is another one for another Python."""


def likeness(value: Any) -> Any:
    """A setting as JSON, to be compared and never to be made again.

    Records are told by their class and fields, functions by their module and name, and those that
    have none by their code. A layer that is recomputed is told as the layer itself, which gives
    the same.

    >>> from anydevice import nn
    >>> likeness(nn.Dropout(0.5))
    {'kind': 'Dropout', '.rate': 0.5}
    >>> likeness(nn.recompute(nn.Dropout(0.5))) == likeness(nn.Dropout(0.5))
    True
    >>> likeness(nn.cross_entropy)
    {'function': 'anydevice.nn.losses.cross_entropy'}
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Recomputed):
        return likeness(value.layer)
    if isinstance(value, Record):
        fields = {f".{name}": likeness(part) for name, part in as_dict(value).items()}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [likeness(part) for part in value]
    if isinstance(value, dict):
        return {f"[{key!r}]": likeness(part) for key, part in value.items()}
    if isinstance(value, functools.partial):
        return {
            "partial": likeness(value.func),
            ".args": likeness(value.args),
            ".keywords": likeness(value.keywords),
        }
    if isinstance(value, types.MethodType):
        return {"method": value.__name__, ".__self__": likeness(value.__self__)}
    if callable(value) and hasattr(value, "__qualname__"):
        return _of_function(value)
    return _ADDRESS.sub("", repr(value))


def difference(before: Any, now: Any, where: str) -> str | None:
    """A sentence about the first place where two likenesses differ; `None` where they do not.

    >>> from anydevice import nn
    >>> two = (likeness(nn.Chain(nn.Dense(2, size), "relu")) for size in (3, 4))
    >>> difference(*two, "layer")
    'its layer.layers[0].outputs was 3, and now it is 4'
    """
    if isinstance(before, dict) and isinstance(now, dict) and _form(before) == _form(now):
        return _of_parts(before, now, where)
    if isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            return f"its {where} had {len(before)} parts, and now it has {len(now)}"
        pairs = enumerate(zip(before, now, strict=True))
        found = (difference(a, b, f"{where}[{at}]") for at, (a, b) in pairs)
        return next((each for each in found if each is not None), None)
    if before == now or repr(before) == repr(now):  # NaN is the same setting as NaN
        return None
    return f"its {where} was {_short(before)}, and now it is {_short(now)}"


def _form(told: dict[str, Any]) -> Any:
    """What two likenesses must have in common to be compared part by part."""
    return told.get("kind"), *(each in told for each in ("function", "partial", "method"))


def _of_parts(before: dict[str, Any], now: dict[str, Any], where: str) -> str | None:
    for name in [*before, *(name for name in now if name not in before)]:
        both = name in before and name in now
        if name.startswith("code of "):
            if both and before[name] != now[name]:
                return f"its {where} is another function, which computes something else"
            continue
        inside = where + name if name[0] in ".[" else where
        if not both:
            return f"its {inside} is there only {'now' if name in now else 'then'}"
        found = difference(before[name], now[name], inside)
        if found is not None:
            return found
    return None


def _of_function(function: Any) -> dict[str, Any]:
    module = getattr(function, "__module__", None)
    name = function.__qualname__
    told: dict[str, Any] = {"function": name if module is None else f"{module}.{name}"}
    if not isinstance(function, types.FunctionType):
        return told
    code = function.__code__
    if "<lambda>" in name:
        told[_CODE] = hashlib.sha256(repr(_of_code(code)).encode()).hexdigest()[:16]
    if function.__closure__:
        told[".__closure__"] = {
            f".{name}": _of_variable(cell)
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
        }
    if function.__defaults__:
        told[".__defaults__"] = likeness(function.__defaults__)
    return told


def _of_code(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_code, [_of_constant(each) for each in code.co_consts], code.co_names


def _of_constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _of_code(value)
    # The order of a set of texts is another one in each process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _of_variable(cell: types.CellType) -> Any:
    """A variable from around a function: as it is where it is plain, else by its class alone.

    It may be anything, the model and the data among them, and may lead back to the function.
    """
    try:
        value = cell.cell_contents
    except ValueError:  # nothing was assigned to it yet
        return None
    return value if isinstance(value, _PLAIN) else type(value).__name__


def _short(value: Any) -> str:
    name = value.get("kind") or value.get("function") if isinstance(value, dict) else None
    shown = name or repr(value)
    return shown if len(shown) <= 120 else f"{shown[:119]}…"
