"""Checkpoints: a training in a file, with the settings it must be resumed with.

Settings are compared by fingerprints, which are JSON: the other ones come from another process.
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
from anydevice.nn._recompute import Recomputed
from anydevice.saving import files as tensor_files
from anydevice.training.batches import sizes_of
from anydevice.training.history import History
from anydevice.training.steps import StepConfig, StepState

_KIND = "training"
_VALIDATION = "validation"
_PLAIN = (bool, int, float, str, type(None))
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_CODE = f"code of Python {sys.version_info[0]}.{sys.version_info[1]}"
"""The key of the code of a lambda, which differs between versions of Python."""


class LoopState(Record):
    """The state of the training loop: its position in the data, and its losses so far.

    `epoch` counts from 1, `position` is how many batches of it were used. `lost` is the sum of
    their losses, weighted by their examples, of which there are `examples`. `best` is the smallest
    loss at the end of an epoch, `waited` how many epochs ago it was: both are kept only where there
    is a patience. `rate` is that of the last step.
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
    """The content of a file: both states, and the best parameters where they are kept."""

    step: StepState
    loop: LoopState
    best: Any = None


def settings_of(
    config: StepConfig, seed: int, schedule: Any, data: Any, validation: Any = None
) -> dict[str, Any]:
    """The settings that must be the same when a training is resumed, as JSON."""
    return {
        "layer": fingerprint(config.layer),
        "loss": fingerprint(config.loss),
        "optimizer": fingerprint(config.optimizer),
        "schedule": fingerprint(schedule),
        "precision": str(config.policy),
        "clip": config.clip,
        "accumulate": config.accumulate,
        "seed": seed,
        "data": sizes_of(data),
        _VALIDATION: None if validation is None else sizes_of(validation),
    }


def write_checkpoint(path: Path, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    step, loop = checkpoint.step, checkpoint.loop
    trees = {
        "parameters": step.parameters,
        "state": step.optimizer,
        "scale": step.scale,
        "best": checkpoint.best,
    }
    metadata = {
        "settings": dict(settings),
        "batches": step.batches,
        "started": step.started,
        "steps": step.steps,
        "place": {**vars(loop), "history": loop.history.to_list()},
    }
    tensor_files.write(path, _KIND, trees, metadata)


def is_checkpoint(path: Path) -> bool:
    """Whether the file is one of a training."""
    return tensor_files.kind_of(path) == _KIND


def read_checkpoint(
    path: Path, settings: Mapping[str, Any], like: Any, device: Device, *, patient: bool
) -> Checkpoint:
    """The checkpoint of a file, on a device.

    A `patient` training looks for the best epoch, with the validation it had before; where there
    was no patience before, that begins now. Raises `TransferError` if the file is damaged,
    newer or of another kind, and `ConfigurationError` if it is that of another training: it
    names the first setting that differs.
    """
    contents = tensor_files.read(path, _KIND, device)
    trees, metadata = contents.trees, contents.metadata
    try:
        kept = patient and trees["best"] is not None
        found = _first_difference(metadata["settings"], settings, kept)
        saved = metadata["place"]
        loop = LoopState(**{**saved, "history": History.from_list(saved["history"])})
        if not kept:
            loop = replace(loop, best=None, waited=0)
        step = StepState(
            trees["parameters"],
            trees["state"],
            metadata["batches"],
            metadata["started"],
            metadata["steps"],
            trees["scale"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise tensor_files.misread(path, contents.written_by, error) from error
    if found is not None:
        raise ConfigurationError(
            f"{path} belongs to another training: {found}; use the same arguments, another "
            "path, or resume=False to start again",
            source="resume",
        )
    shapes = [tuple(x.shape) for x in leaves(step.parameters)]
    if shapes != [tuple(x.shape) for x in leaves(like)]:
        raise TransferError(f"{path}: its parameters do not have the shapes of the model's")
    return Checkpoint(step, loop, trees["best"] if kept else None)


def _first_difference(
    saved: Mapping[str, Any], settings: Mapping[str, Any], kept: bool
) -> str | None:
    """A sentence about the first setting that differs."""
    for name, value in settings.items():
        if name == _VALIDATION and not kept:
            continue
        compare = _data_difference if name in ("data", _VALIDATION) else setting_difference
        found = compare(saved[name], value, name)
        if found is not None:
            return found
    return None


def _data_difference(before: Any, now: Any, where: str) -> str | None:
    """Of the sizes of data, those that both have are compared."""
    if before is None or now is None:
        if before is now:
            return None
        return f"its {where} is there only {'now' if before is None else 'then'}"
    both = [name for name in before if name in now]
    then, today = ({f".{name}": each[name] for name in both} for each in (before, now))
    return setting_difference(then, today, where)


def fingerprint(value: Any) -> Any:
    """A setting as JSON, for comparing alone.

    Records have their class and fields, functions their module and name, lambdas their code. A
    layer that is recomputed has the fingerprint of the layer itself, which gives the same.

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
        return _function_fingerprint(value)
    return _ADDRESS.sub("", repr(value))


def setting_difference(before: Any, now: Any, where: str) -> str | None:
    """A sentence about the first place where two fingerprints differ; `None` if they do not.

    >>> from anydevice import nn
    >>> two = (fingerprint(nn.Chain(nn.Dense(2, size), "relu")) for size in (3, 4))
    >>> setting_difference(*two, "layer")
    'its layer.layers[0].outputs was 3, and now it is 4'
    """
    if isinstance(before, dict) and isinstance(now, dict) and _shape(before) == _shape(now):
        return _part_difference(before, now, where)
    if isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            return f"its {where} had {len(before)} parts, and now it has {len(now)}"
        pairs = enumerate(zip(before, now, strict=True))
        found = (setting_difference(a, b, f"{where}[{at}]") for at, (a, b) in pairs)
        return next((each for each in found if each is not None), None)
    if before == now or repr(before) == repr(now):  # NaN is the same setting as NaN
        return None
    return f"its {where} was {_short(before)}, and now it is {_short(now)}"


def _shape(found: dict[str, Any]) -> Any:
    """What two fingerprints must have in common to be compared part by part."""
    return found.get("kind"), *(each in found for each in ("function", "partial", "method"))


def _part_difference(before: dict[str, Any], now: dict[str, Any], where: str) -> str | None:
    for name in [*before, *(name for name in now if name not in before)]:
        both = name in before and name in now
        if name.startswith("code of "):
            if both and before[name] != now[name]:
                return f"its {where} is another function, which computes something else"
            continue
        inside = where + name if name[0] in ".[" else where
        if not both:
            return f"its {inside} is there only {'now' if name in now else 'then'}"
        found = setting_difference(before[name], now[name], inside)
        if found is not None:
            return found
    return None


def _function_fingerprint(function: Any) -> dict[str, Any]:
    module = getattr(function, "__module__", None)
    name = function.__qualname__
    found: dict[str, Any] = {"function": name if module is None else f"{module}.{name}"}
    if not isinstance(function, types.FunctionType):
        return found
    code = function.__code__
    if "<lambda>" in name:
        found[_CODE] = hashlib.sha256(repr(_code_values(code)).encode()).hexdigest()[:16]
    if function.__closure__:
        found[".__closure__"] = {
            f".{name}": _variable(cell)
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
        }
    if function.__defaults__:
        found[".__defaults__"] = fingerprint(function.__defaults__)
    return found


def _code_values(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_code, [_constant(each) for each in code.co_consts], code.co_names


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code_values(value)
    # The order of a set of strings differs from process to process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _variable(cell: types.CellType) -> Any:
    """A closure variable of a function: a plain value as it is, else the name of its class.

    It may be anything, such as the model or the data, and may lead back to the function.
    """
    try:
        value = cell.cell_contents
    except ValueError:  # not assigned yet
        return None
    return value if isinstance(value, _PLAIN) else type(value).__name__


def _short(value: Any) -> str:
    name = value.get("kind") or value.get("function") if isinstance(value, dict) else None
    shown = name or repr(value)
    return shown if len(shown) <= 120 else f"{shown[:119]}…"
