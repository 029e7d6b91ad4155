"""Checkpoints: a training saved to a file, with the settings that resuming requires.

Settings are compared by JSON fingerprints, because the saved ones come from another process.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from anydevice._arrays.move import to_numpy
from anydevice._compile.compile import OPTIMIZATIONS
from anydevice._core.checks import is_number
from anydevice._core.device import Device
from anydevice._core.locks import FileLock
from anydevice._core.protocols import StepState
from anydevice._core.record import NOTHING, Record, as_dict, replace
from anydevice._core.trees import difference, leaves, mapped, partition, refilled
from anydevice._formats import model as tensor_files
from anydevice._formats.packed import PackedTree
from anydevice._libraries.layers import ModuleLayer
from anydevice._machine.engines.registry import owner_of
from anydevice._nn.layer import Layer
from anydevice._nn.optimizers import Optimizer
from anydevice._nn.recompute import Recomputed
from anydevice._train.batches import INPUT_ERRORS, Batches, module_batch, rows_of, sizes_of
from anydevice._train.history import History
from anydevice._train.step_config import StepConfig
from anydevice.errors import ConfigurationError, TransferError

_KIND, _MOST = "training", 2**53
_VALIDATION, _FROZEN = "validation", "frozen"
_HASHES = ("content", "whole", "sample")
_MOST_HASHED, _MOST_BATCHES = 64 * 2**20, 64
"""Bytes of data that are hashed in full, and the most batches that version 0.2 hashed so."""
_LEAST_ROWS = 700
"""Rows in the hash of larger data: 0.99^700 < 0.001."""
_PLAIN = (bool, int, float, str, type(None))
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_CODE_OF = "code of Python "
_CODE = f"{_CODE_OF}3.{sys.version_info.minor}"
"""A key of a function's fingerprint that differs between versions of Python."""
_INSTALLED = {"site-packages", "dist-packages"}


class LoopState(Record):
    """The state of the training loop: its position in the data, and its losses so far.

    `position` counts the batches of `epoch` already used, and `lost` sums their losses, weighted by
    examples. `best` is the smallest loss at the end of an epoch, `waited` the number of epochs
    since; both are used only with a patience. `rate` is the rate of the last step, and `judged` has
    the losses of epochs that a schedule was told.
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
    judged: tuple[float, ...] = ()


class Checkpoint(Record):
    """The content of a file: both states, how steps are compiled, and the best parameters, if any.

    `random` holds the states of the global random generators, now and at the start of the epoch;
    `rows` is the number of rows of the batch with weight 1 among the accumulated gradients.
    """

    step: StepState
    loop: LoopState
    optimize: str
    best: Any = None
    random: Mapping[str, Any] = NOTHING
    rows: int = 0


def settings_of(
    config: StepConfig, seed: int, schedule: Any, data: Any, validation: Any = None
) -> dict[str, Any]:
    """Return the settings that must be the same when a training is resumed, as JSON."""
    return {
        "layer": fingerprint(config.layer),
        "loss": fingerprint(config.loss),
        "optimizer": fingerprint(config.optimizer),
        "schedule": fingerprint(schedule),
        "precision": str(config.policy),
        "clip": config.clip,
        "accumulate": config.accumulate,
        "seed": seed,
        "data": sizes_of(data) | content_of(data),
        _VALIDATION: None if validation is None else sizes_of(validation) | content_of(validation),
    }


def content_of(data: Any) -> dict[str, str]:
    """Return a hash of array data, independent of its library; nothing for other data.

    Data of up to 64 MiB is hashed in full; of larger data, at least 700 rows at random positions:
    if 1 % of the rows change, one of them is among these in 999 of 1000 cases. Only data that
    version 0.2 hashed in full has the name "content".
    """
    if not isinstance(data, Batches | list | tuple):
        return {}
    batches = [(data.x, data.y, data.weights)] if isinstance(data, Batches) else data
    form = tuple if isinstance(data, Batches) else module_batch
    counts, size, wide = [], 0, 0
    try:
        for batch in map(form, batches):
            counts.append(rows_of(batch))
            wide += (own := sum(4 * math.prod(map(int, x.shape)) for x in leaves(batch)))
            size += sum(getattr(x, "nbytes", own) for x in leaves(batch))
    except INPUT_ERRORS:
        return {}  # the training itself raises the error
    name = "content" if wide <= _MOST_HASHED and len(batches) <= _MOST_BATCHES else "whole"
    if min(size, wide) > _MOST_HASHED:
        name, total = "sample", sum(counts)
        draws = max(_LEAST_ROWS, _MOST_HASHED // max(512, wide // total))
        # The numbers of RandomState are the same in every version of NumPy.
        places = np.unique(np.random.RandomState(0).randint(0, total, draws, np.int64))
    digest, first = hashlib.blake2b(digest_size=16), 0
    for batch, count in zip(map(form, batches), counts, strict=True):
        for array in leaves(batch):
            digest.update(repr(tuple(array.shape)).encode())
            rows = array if isinstance(array, np.ndarray) else to_numpy(array)
            if name == "sample" and rows.ndim:
                own_places = places[slice(*np.searchsorted(places, (first, first + count)))]
                rows = rows.take(own_places - first, 0, mode="clip")
            # The same numbers in another dtype are the same data: the training converts them.
            kind = np.float32 if rows.dtype.kind not in "biu" else np.int64
            for part in np.array_split(rows.reshape(-1), 1 + rows.nbytes // 2**24):
                with np.errstate(over="ignore"):
                    digest.update(np.ascontiguousarray(part, kind).view(np.uint8).data)
        first += count
    return {name: digest.hexdigest()}


def write_checkpoint(path: Path, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically."""
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
        "optimize": checkpoint.optimize,
        "place": {**vars(loop), "history": loop.history.to_list()},
    }
    if step.total is not None:
        trees["total"] = step.total
    if step.added:
        metadata.update(added=step.added, rows=checkpoint.rows)
    if step.own is not None:
        trees["own"] = dict(step.own)
        metadata["own"] = step.own.text
    if checkpoint.random:
        metadata["random"] = dict(checkpoint.random)
    tensor_files.write(path, _KIND, trees, metadata)


def lock_training(path: Path) -> ExitStack:
    """Lock the file of a training until the stack is closed; raise if another one saves to it."""
    lock = ExitStack()
    try:
        lock.enter_context(FileLock(path))
    except BlockingIOError as error:
        raise ConfigurationError(
            f"save: another training saves to {path}: {error.strerror}; wait until it has "
            "ended, or give save= another path",
            source="save",
        ) from None
    return lock


def is_checkpoint(path: Path) -> bool:
    """Whether the file is a checkpoint of a training."""
    return tensor_files.kind_of(path) == _KIND


def read_checkpoint(
    path: Path,
    settings: Mapping[str, Any],
    like: Any,
    optimizer: Optimizer | None,
    device: Device,
    *,
    patient: bool,
    trained: Sequence[bool] | None = None,
) -> Checkpoint:
    """Read the checkpoint of a model with parameters `like` these onto a device."""
    contents = tensor_files.read(path, _KIND, device)
    trees, metadata = contents.trees, contents.metadata
    try:
        patient = patient and trees["best"] is not None
        other = _first_difference(metadata["settings"], settings, patient)
        saved = metadata["place"]
        loop = LoopState(**{**saved, "history": History.from_list(saved["history"])})
        loop = replace(loop, judged=tuple(loop.judged))
        if not patient:
            loop = replace(loop, best=None, waited=0)
        counts = {name: metadata[name] for name in ("batches", "started", "steps")}
        own = None
        if metadata.get("own") is not None:
            own = PackedTree(trees.get("own") or {})
            own.text = metadata["own"]
        step = StepState(
            trees["parameters"],
            trees["state"],
            **counts,
            scale=trees["scale"],
            total=trees.get("total"),
            added=metadata.get("added", 0.0),
            own=own,
        )
        # Files without this field were compiled unless the caller said otherwise.
        how = metadata.get("optimize", "default")
        best = trees["best"] if patient else None
        _check_counts(*counts.values(), loop.epoch - 1, loop.position, loop.examples, loop.waited)
        _check_numbers(loop.lost, loop.seconds, loop.rate, loop.best or 0.0, step.added)
        _check_numbers(*loop.judged)
        if step.added:
            _check_counts(metadata["rows"])
        for epoch in loop.history:
            _check_counts(epoch.epoch, epoch.steps, epoch.left_out, epoch.peak or 0)
            _check_numbers(epoch.loss, epoch.validation or 0.0, epoch.rate, epoch.seconds)
        if how not in OPTIMIZATIONS:
            raise ValueError(f"it knows no way to compile steps called {how!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise tensor_files.misread(path, contents.written_by, error) from error
    if other is not None:
        raise ConfigurationError(
            f"{path} belongs to another training: {other}; use the same arguments, another "
            "path, or resume=False to start again",
            source="resume",
        )
    state = None if optimizer is None else _state_like(optimizer, like, trained)
    for what, tree, expected in (
        ("parameters", step.parameters, like),
        ("optimizer's state", step.optimizer, state),
        ("best parameters", best, None if best is None else like),
    ):
        different = None if expected is None else difference(expected, tree)
        if different is not None:
            raise TransferError(f"{path} does not fit the model: in its {what}, {different}")
    if step.scale is not None and not _is_scale(step.scale):
        raise TransferError(f"{path}: its scale of the loss is damaged")
    if state is not None:  # other libraries store their own classes in it
        step = replace(step, optimizer=refilled(state, leaves(step.optimizer)))
    return Checkpoint(
        step, loop, how, best, metadata.get("random", NOTHING), metadata.get("rows", 0)
    )


def _check_counts(*counts: Any) -> None:
    for count in counts:
        if type(count) is not int or not 0 <= count < _MOST:
            raise ValueError(f"{count!r} is not a count")


def _check_numbers(*numbers: Any) -> None:
    for number in numbers:
        if not is_number(number):
            raise ValueError(f"it has {number!r} in place of a number")


def _state_like(optimizer: Optimizer, parameters: Any, trained: Sequence[bool] | None) -> Any:
    """Return the shapes of the optimizer's state; `None` if it needs real parameters."""
    if trained is not None:
        parameters, _ = partition(parameters, trained)
    hollow = mapped(lambda x: np.broadcast_to(np.float32(0), tuple(x.shape)), parameters)
    try:
        return optimizer.init(hollow)
    except Exception:
        return None


def _is_scale(scale: Any) -> bool:
    if not isinstance(scale, dict) or scale.keys() != {"scale", "good_steps"}:
        return False
    return all(tuple(getattr(number, "shape", (0,))) == () for number in scale.values())


def _first_difference(
    saved: Mapping[str, Any], settings: Mapping[str, Any], patient: bool
) -> str | None:
    """Return a sentence about the first setting that differs."""
    for name, value in settings.items():
        if name == _VALIDATION and not patient:
            continue
        compare = _data_difference if name in ("data", _VALIDATION) else setting_difference
        before = saved.get(name) if name == _FROZEN else saved[name]  # missing in early files
        text = compare(before, value, name)
        if text is not None:
            return text
    return None


def _data_difference(before: Any, now: Any, where: str) -> str | None:
    """Compare the sizes of data that both settings have in common."""
    if before is None or now is None:
        if before is now:
            return None
        return f"its {where} is there only {'now' if before is None else 'then'}"
    both = [name for name in before if name in now and name not in _HASHES]
    then, today = ({f".{name}": values[name] for name in both} for values in (before, now))
    text = setting_difference(then, today, where)
    # Early files, and data that cannot be read ahead, have no hash.
    if text is None and any(before[x] != now[x] for x in _HASHES if x in before and x in now):
        return f"its {where} held other numbers than now"
    return text


def fingerprint(value: Any) -> Any:
    """Return a setting as JSON, for comparisons only."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Recomputed):
        return fingerprint(value.layer)
    if isinstance(value, Layer) and value.alone is not value:
        return fingerprint(value.alone)
    if isinstance(value, ModuleLayer):
        return {"kind": value.label}
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
    """Return a sentence about the first difference of two fingerprints; `None` if there is none."""
    if isinstance(before, dict) and isinstance(now, dict) and _shape(before) == _shape(now):
        return _part_difference(before, now, where)
    if isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            return f"its {where} had {len(before)} parts, and now it has {len(now)}"
        pairs = enumerate(zip(before, now, strict=True))
        texts = (setting_difference(a, b, f"{where}[{at}]") for at, (a, b) in pairs)
        return next(filter(None, texts), None)
    if before == now or repr(before) == repr(now):  # NaN is the same setting as NaN
        return None
    return f"its {where} was {_short(before)}, and now it is {_short(now)}"


def _shape(fields: dict[str, Any]) -> Any:
    """Return the parts that two fingerprints must share to be compared part by part."""
    return fields.get("kind"), *(name in fields for name in ("function", "partial", "method"))


def _part_difference(before: dict[str, Any], now: dict[str, Any], where: str) -> str | None:
    for name in [*before, *(name for name in now if name not in before)]:
        both = name in before and name in now
        if name.startswith(_CODE_OF):
            if both and before[name] != now[name]:
                return f"its {where} is another function, which computes something else"
            continue
        inside = where + name if name[0] in ".[" else where
        if not both and before.get(name) is now.get(name) is None:
            continue  # an unused field that earlier versions did not have
        if not both:
            return f"its {inside} is there only {'now' if name in now else 'then'}"
        then = _public_name(before[name]) if name == "function" else before[name]
        text = setting_difference(then, now[name], inside)
        if text is not None:
            return text
    return None


def _public_name(name: str) -> str:
    """Return the public name of a function of anydevice; other names are returned unchanged.

    Checkpoints of version 0.2 contain the module path that the function had then.

    >>> _public_name("anydevice._nn.losses.cross_entropy")
    'anydevice.nn.cross_entropy'
    >>> _public_name("anydevice.nn.losses.cross_entropy"), _public_name("mine.loss")
    ('anydevice.nn.cross_entropy', 'mine.loss')
    """
    package, *rooms, function = name.split(".")
    if package != "anydevice" or not rooms or "<" in name:
        return name
    room = rooms[0].lstrip("_")
    return f"anydevice.{'nn' if room in ('train', 'training') else room}.{function}"


def _function_fingerprint(function: Any) -> dict[str, Any]:
    module = getattr(function, "__module__", None)
    name = function.__qualname__
    path = _public_name(name if module is None else f"{module}.{name}")
    fields: dict[str, Any] = {"function": path}
    if not isinstance(function, types.FunctionType):  # compilers keep the function they compile
        function = getattr(function, "__wrapped__", None)
    if not isinstance(function, types.FunctionType):
        return fields
    if "<lambda>" in name or not _is_installed(function):
        own, *others = _program(function, set())
        for key, values in ((_CODE, own), (f"{_CODE}, and of what it calls", others)):
            fields[key] = hashlib.sha256(repr(values).encode()).hexdigest()[:16]
    fields[".__closure__"] = {
        f".{name}": value if isinstance(value, _PLAIN) else type(value).__name__
        for name, value in _variables(function).items()
    }
    for defaults in () if path.startswith("anydevice.") else ("__defaults__", "__kwdefaults__"):
        fields[f".{defaults}"] = fingerprint(getattr(function, defaults))
    return {key: value for key, value in fields.items() if value}


def _is_installed(function: types.FunctionType) -> bool:
    """Whether a function belongs to a library: its code changes with the version."""
    folders = Path(function.__code__.co_filename).parts
    return f"{function.__module__}.".startswith("anydevice.") or not _INSTALLED.isdisjoint(folders)


def _program(function: types.FunctionType, visited: set[int]) -> list[Any]:
    """Return the code of a function, of the user's functions it calls, and hashes of its arrays."""
    visited.add(id(function))
    program: list[Any] = [_code_values(function.__code__, function.__doc__)]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    for value in [*_variables(function).values(), *named]:
        if isinstance(value, types.FunctionType) and not _is_installed(value):
            program += [] if id(value) in visited else _program(value, visited)
        elif owner_of(value) is not None:
            program.append(content_of([(value,)]))
    return program


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, as far as they are assigned."""
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            variables[name] = cell.cell_contents
    return variables


def _code_values(code: types.CodeType, text: str | None = None) -> tuple[Any, ...]:
    constants = [_constant(value) for value in code.co_consts if value is None or value != text]
    return code.co_code, constants, code.co_names


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code_values(value)
    # The order of a set of strings differs between processes.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _short(value: Any) -> str:
    name = value.get("kind") or value.get("function") if isinstance(value, dict) else None
    shown = name or repr(value)
    return shown if len(shown) <= 120 else f"{shown[:119]}…"
