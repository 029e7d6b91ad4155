"""A training in a file: all that it needs to go on as if nothing had happened.

Whether two settings are the same ones, when one of them was written down by another process.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice.core.device import Device
from anydevice.core.record import Record, as_dict, replace
from anydevice.core.trees import leaves
from anydevice.errors import ConfigurationError, TransferError
from anydevice.nn.recompute import Recomputed
from anydevice.saving import files as tensor_files
from anydevice.training.batches import sizes_of
from anydevice.training.history import History
from anydevice.training.steps import Standing, StepConfig

_KIND = "training"
_JUDGE = "validation"


class Place(Record):
    """Where in the data a training is, and what it knows of its course.

    `epoch` counts from 1, `position` is how many batches of it were used. `lost` is the sum of
    their losses, each counted for as often as it has examples, `examples` how many those are.
    `best` is the least loss that was seen at the end of an epoch, `waited` for how many epochs it
    has not become less: both are kept only where there is a patience. `rate` is that of the last
    step.
    """

    epoch: int = 1
    position: int = 0
    lost: float = 0.0
    examples: int = 0
    seconds: float = 0.0
    history: History = History()
    best: float | None = None
    waited: int = 0
    rate: float = 0.0


class Checkpoint(Record):
    """What a file holds: the arrays, the place, and the best parameters where they are kept."""

    standing: Standing
    place: Place
    best: Any = None


def settings_of(
    recipe: StepConfig, seed: int, schedule: Any, data: Any, judge: Any = None
) -> dict[str, Any]:
    """What must be the same when a training is resumed, as JSON.

    `judge` is the data whose loss patience goes by.
    """
    return {
        "layer": fingerprint(recipe.layer),
        "loss": fingerprint(recipe.loss),
        "optimizer": fingerprint(recipe.optimizer),
        "schedule": fingerprint(schedule),
        "precision": str(recipe.policy),
        "clip": recipe.clip,
        "accumulate": recipe.accumulate,
        "seed": seed,
        "data": sizes_of(data),
        _JUDGE: None if judge is None else sizes_of(judge),
    }


def write_checkpoint(path: Path, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    standing, place = checkpoint.standing, checkpoint.place
    trees = {
        "parameters": standing.parameters,
        "state": standing.state,
        "scale": standing.scale,
        "best": checkpoint.best,
    }
    said = {
        "settings": dict(settings),
        "batches": standing.batches,
        "started": standing.started,
        "steps": standing.steps,
        "place": {**vars(place), "history": place.history.to_list()},
    }
    tensor_files.write(path, _KIND, trees, said)


def is_checkpoint(path: Path) -> bool:
    """Whether the file is one of a training."""
    return tensor_files.kind_of(path) == _KIND


def read_checkpoint(
    path: Path, settings: Mapping[str, Any], like: Any, device: Device, *, judged: bool
) -> Checkpoint:
    """What `write_checkpoint` wrote, on a device.

    With `judged`, the best epoch is looked for, and must be judged by what judged it before; where
    none was looked for, that begins now. Raises `TransferError` where the file is damaged, newer or
    of another kind, and `ConfigurationError` where it is that of another training: it names what
    differs.
    """
    contents = tensor_files.read(path, _KIND, device)
    try:
        kept = judged and contents.trees["best"] is not None
        found = _other(contents.said["settings"], settings, kept)
        place = _place(contents.said["place"], kept)
        standing = Standing(
            contents.trees["parameters"],
            contents.trees["state"],
            contents.said["batches"],
            contents.said["started"],
            contents.said["steps"],
            contents.trees["scale"],
        )
        best = contents.trees["best"] if kept else None
    except (KeyError, TypeError, AttributeError) as error:
        raise tensor_files.misread(path, contents.written_by, error) from error
    if found is not None:
        raise ConfigurationError(
            f"{path} is that of another training: {found}; give what was given then, another "
            "path, or resume=False to begin anew",
            source="resume",
        )
    shapes = [tuple(x.shape) for x in leaves(standing.parameters)]
    if shapes != [tuple(x.shape) for x in leaves(like)]:
        raise TransferError(f"{path}: its parameters have not the shapes of the model's")
    return Checkpoint(standing, place, best)


def _place(saved: Mapping[str, Any], kept: bool) -> Place:
    place = Place(**{**saved, "history": History.from_list(saved["history"])})
    return place if kept else replace(place, best=None, waited=0)


def _other(saved: Mapping[str, Any], settings: Mapping[str, Any], kept: bool) -> str | None:
    """A sentence about the first setting that is another one."""
    for name, value in settings.items():
        if name == _JUDGE and not kept:
            continue
        differs = _data_differs if name in ("data", _JUDGE) else difference
        found = differs(saved[name], value, name)
        if found is not None:
            return found
    return None


def _data_differs(before: Any, now: Any, where: str) -> str | None:
    """Of two kinds of data, what both of them say is compared."""
    if before is None or now is None:
        if before is now:
            return None
        return f"its {where} is there only {'now' if before is None else 'then'}"
    both = [name for name in before if name in now]
    then, today = ({f".{name}": each[name] for name in both} for each in (before, now))
    return difference(then, today, where)


_PLAIN = (bool, int, float, str, type(None))
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_CODE = f"code of Python {sys.version_info[0]}.{sys.version_info[1]}"
"""Where the code of a function without a name is told: it is another one for another Python."""


def fingerprint(value: Any) -> Any:
    """A setting as JSON, to be compared and never to be made again.

    Records are told by their class and fields, functions by their module and name, and those that
    have none by their code. A layer that is recomputed is told as the layer itself, which gives
    the same.

    >>> from anydevice import nn
    >>> fingerprint(nn.Dropout(0.5))
    {'kind': 'Dropout', '.rate': 0.5}
    >>> fingerprint(nn.recompute(nn.Dropout(0.5))) == fingerprint(nn.Dropout(0.5))
    True
    >>> fingerprint(nn.cross_entropy)
    {'function': 'anydevice.nn.losses.cross_entropy'}
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Recomputed):
        return fingerprint(value.layer)
    if isinstance(value, Record):
        fields = {f".{name}": fingerprint(part) for name, part in as_dict(value).items()}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [fingerprint(part) for part in value]
    if isinstance(value, dict):
        return {f"[{key!r}]": fingerprint(part) for key, part in value.items()}
    if isinstance(value, functools.partial):
        return {
            "partial": fingerprint(value.func),
            ".args": fingerprint(value.args),
            ".keywords": fingerprint(value.keywords),
        }
    if isinstance(value, types.MethodType):
        return {"method": value.__name__, ".__self__": fingerprint(value.__self__)}
    if callable(value) and hasattr(value, "__qualname__"):
        return _of_function(value)
    return _ADDRESS.sub("", repr(value))


def difference(before: Any, now: Any, where: str) -> str | None:
    """A sentence about the first place where two likenesses differ; `None` where they do not.

    >>> from anydevice import nn
    >>> two = (fingerprint(nn.Chain(nn.Dense(2, size), "relu")) for size in (3, 4))
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
        told[".__defaults__"] = fingerprint(function.__defaults__)
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
