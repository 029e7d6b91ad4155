"""Models with layers on several devices, in host memory or on disk, one stage after the other."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal
from uuid import uuid4

from anydevice._arrays.move import to_device, to_numpy
from anydevice._compile.versions import FallbackFunction, compilers_for
from anydevice._core import checks
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.files import expanded
from anydevice._core.record import Record, replace
from anydevice._core.text import warn
from anydevice._core.trees import first_leaf, leaf_names, leaves, refilled
from anydevice._libraries.registry import is_torch_module, part
from anydevice._machine.choose.scope import one_device
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice._nn.layer import Layer, Parameters, Run, Wrapper, autodiff_of, state_places
from anydevice._nn.layers import Chain, TiedEmbedding
from anydevice._nn.model import Model, bound
from anydevice._nn.recompute import Recomputed
from anydevice._ops import embedding, linear
from anydevice._parallel.mesh import no_collectives
from anydevice._parallel.offload import Fetcher, KeptArray, kept_in_memory, read_parts, write_parts
from anydevice._plan.plan import Plan, planned_units
from anydevice.errors import ConfigurationError, DeviceNotFoundError

Places = Sequence[str | Device] | Mapping[str, str | Device] | Plan
Held = Literal["", "cpu", "disk"]

DISK = "disk"


class Place(Record):
    """The place of parameters: on `device`, or `held` in host memory ("cpu") or on disk."""

    device: Device
    held: Held = ""

    def __str__(self) -> str:
        return f"{self.held} for {self.device}" if self.held else str(self.device)


class Unit(Record):
    """A part between which a model can be cut: its name, and the bytes of its parameters."""

    name: str
    size: int
    is_layer: bool = True
    """Whether plans count it as a layer; embeddings and heads are not."""


def pipeline(
    model: Any,
    devices: Places,
    *,
    microbatches: int = 1,
    folder: str | os.PathLike[str] | None = None,
) -> Any:
    """Return the model with its layers on several devices, one stage after the other.

    `devices` is a list, over which the layers are divided evenly by bytes; or a plan of
    `plan_inference` for this model; or a dict of the names of layers and their places, such as
    `{"model.layers": "cpu", "lm_head": "cuda:0"}`, in which the longest name that fits counts.

    >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
    >>> held = pipeline(model, ["cpu", "disk"])
    >>> x = numpy.ones((3, 4), numpy.float32)
    >>> numpy.allclose(held(x), model(x)), [stage.place.held for stage in held.layer.stages]
    (True, ['', 'disk'])

    Beside an accelerator, "cpu" means host memory, and "disk" an unnamed file in `folder` (by
    default the system's temporary folder), which is gone with the process. The accelerator before
    them in the list computes these layers. Each is brought while the layer before computes, so they
    take the device memory of two layers. In training, layers in host memory are brought again for
    the gradients and updated by the CPU; layers on disk cannot be trained.

    A `nn.Model` is not changed. A module of PyTorch, such as a model of Hugging Face, is moved in
    place. Inputs must be on the first device; the output is on the last. With `microbatches`, a
    training divides its batches, so that several devices compute at once (GPipe: Huang et al.
    2019).

    Raises `ConfigurationError` for names that the model does not have, for more places than layers
    and for a plan of another model; `DeviceNotFoundError` for a device that is not there;
    `UnsupportedError` if an engine drives one device only.
    """
    microbatches = checks.integer("microbatches", microbatches, 1)
    if not isinstance(devices, Iterable | Plan):
        raise ConfigurationError(
            f"devices is a list, a plan or a dict of layers and places, not {devices!r}",
            source="devices",
        )
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise ConfigurationError(f"folder is a path, not {folder!r}", source="folder")
    if is_torch_module(model):
        from anydevice._parallel.pipeline_modules import pipelined_module

        return pipelined_module(model, devices, microbatches, folder)
    if not isinstance(model, Model):
        raise ConfigurationError(
            f"a pipeline is made of a nn.Model or a module of PyTorch, not of "
            f"{type(model).__name__}",
            source="model",
        )
    return _pipeline_model(model, devices, microbatches, folder)


# Where each unit goes


def placed_units(
    units: Sequence[Unit], given: Places, engine: str | None, parameters: int | None = None
) -> tuple[list[Place], str]:
    """Return the place of each unit, and the engine; `parameters` shows a plan of another model."""
    if isinstance(given, Plan):
        placements = planned_units(given, [unit.is_layer for unit in units], parameters)
        used = list(dict.fromkeys(placements))
        places, chosen = _places([placement.device for placement in used], engine)
        by_placement = dict(zip(used, places, strict=True))
        return [by_placement[placement] for placement in placements], chosen
    if isinstance(given, Mapping):
        return _by_name(units, given, engine)
    places, chosen = _places([given] if isinstance(given, str | Device) else list(given), engine)
    return [places[at] for at in divided(units, len(places))], chosen


def divided(units: Sequence[Unit], count: int) -> list[int]:
    """Divide units into `count` parts of about equal bytes; return the part of each unit."""
    sizes = [unit.size for unit in units if unit.size] or [1] * len(units)
    if count > len(sizes):
        raise ConfigurationError(
            f"{count} places are too many for {len(sizes)} layers with parameters; give fewer",
            source="devices",
        )
    if not count:
        raise ConfigurationError("devices is empty; name at least one", source="devices")
    ends: list[int] = []
    start = 0
    for left in range(count, 0, -1):
        aim, own, stop = sum(sizes[start:]) / left, 0.0, start
        last = len(sizes) - left + 1  # each further part gets one, too
        while stop < last and (own + sizes[stop] / 2 <= aim or stop == start):
            own += sizes[stop]
            stop += 1
        ends.append(stop if left > 1 else len(sizes))
        start = stop
    numbers = [n for n, (a, b) in enumerate(pairwise([0, *ends])) for _ in range(b - a)]
    if not any(unit.size for unit in units):
        return numbers
    parts, rest, part_number = [], iter(numbers), 0
    for unit in units:
        part_number = next(rest) if unit.size else part_number
        parts.append(part_number)
    return parts


def _by_name(
    units: Sequence[Unit], given: Mapping[str, str | Device], engine: str | None
) -> tuple[list[Place], str]:
    """Place each unit by its longest matching prefix."""
    keys = list(given)
    for key in keys:
        if not any(_holds(key, unit.name) for unit in units):
            known = [unit.name for unit in units]
            raise ConfigurationError(
                f"the model has no layer {key!r}; its layers are {_shorten(known)}",
                source="devices",
            )
    longest = sorted(keys, key=len, reverse=True)
    matches = [next((key for key in longest if _holds(key, u.name)), None) for u in units]
    for unit, match in zip(units, matches, strict=True):
        if match is None and unit.size:
            raise ConfigurationError(
                f"devices has no place for the layer {unit.name!r}", source="devices"
            )
    places, chosen = _places([given[key] for key in keys], engine)
    by_key = dict(zip(keys, places, strict=True))
    place = next(by_key[match] for match in matches if match is not None)
    placed = []
    for match in matches:  # a unit without bytes stays with the one before it
        place = place if match is None else by_key[match]
        placed.append(place)
    return placed, chosen


def _holds(key: str, name: str) -> bool:
    return name == key or not key or (name.startswith(key) and name[len(key)] in ".[")


def _places(given: Sequence[str | Device], engine: str | None) -> tuple[list[Place], str]:
    """Return the places of a list, and the engine that drives its devices."""
    names = [str(device) for device in given]
    named = {d.engine for d in given if isinstance(d, Device) and not d.engine_is_free}
    chosen = _engine_for([name for name in names if name != DISK], named or {engine})
    devices = [None if name == DISK else one_device(name, engine=chosen) for name in names]
    beside = any(device is not None and device.kind != "cpu" for device in devices)
    computing = [d for d in devices if d is not None and (d.kind != "cpu" or not beside)]
    last = computing[0] if computing else one_device("cpu", engine=chosen)
    places = []
    for device in devices:
        if device is None:
            places.append(Place(last, "disk"))
        elif beside and device.kind == "cpu":
            places.append(Place(last, "cpu"))
        else:
            last = device
            places.append(Place(device))
    return places, chosen


def _engine_for(names: Sequence[str], wanted: set[str | None]) -> str:
    """Return an engine that drives all devices: the model's own, if it does."""
    first = sorted(map(str, filter(None, wanted)))
    others = sorted(("torch", "jax"), key=lambda name: not registry.loaded(name))
    error: DeviceNotFoundError | None = None
    for engine in (*first, *(name for name in others if name not in first)):
        try:
            for name in names:
                one_device(name, engine=engine)
        except DeviceNotFoundError as missing:
            error = error or missing
            continue
        return engine
    for name in names:
        one_device(name)  # raises if it is not there at all
    raise no_collectives(
        f"no installed array library drives {_shorten(names)} together",
        "use PyTorch or JAX, and devices that one of them drives",
    ) from error


def _shorten(names: Sequence[str]) -> str:
    shown = [*names[:6], "…", names[-1]] if len(names) > 8 else names
    return ", ".join(map(str, shown))


def folder_for(given: str | os.PathLike[str] | None, places: Sequence[Place]) -> Path | None:
    """Return the folder of parts on disk, by default the system's; `None` without such parts."""
    if not any(place.held == "disk" for place in places):
        return None
    if given is None:
        return Path(gettempdir())
    folder = expanded(given)
    if not folder.is_dir():
        raise ConfigurationError(f"folder: there is no folder {folder}", source="folder")
    return folder


def on_disk(folder: Path, arrays: Mapping[str, Any]) -> dict[str, KeptArray]:
    """Write NumPy arrays to a file without a name: none can shorten it, and the process ends it."""
    path = folder / f"anydevice-parts-{uuid4().hex}.safetensors"
    write_parts(path, arrays)
    entries = read_parts(path)
    try:
        path.unlink()
    except OSError:  # Windows keeps the names of open files, and their sizes
        atexit.register(path.unlink, missing_ok=True)
    return entries


def moved(x: Any, device: Device) -> Any:
    """Return an array on a device, directly from where it is; gradients go back the same way."""
    owner = owner_of(x)
    return x if owner is None or owner.devices_of(x) == (device,) else owner.move(x, device)


# Models of nn


class Stage(Record):
    """Consecutive layers in one place: the paths that lead to them, and their parameters."""

    place: Place
    steps: tuple[PlacedStep, ...]


class PlacedStep(Record):
    """A layer of a model: its path, itself, and the keys that lead to its parameters."""

    path: str
    layer: Layer
    keys: tuple[str | int, ...]

    def parameters_in(self, tree: Parameters) -> Parameters:
        for key in self.keys:
            tree = tree[key]
        return tree


class _Embedded(Layer):
    """The beginning of a `TiedEmbedding`, as a layer of its matrix."""

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return embedding(parameters, x)


class _Projected(Layer):
    """The end of a `TiedEmbedding`."""

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return linear(x, parameters)


class _Work:
    """The stages of a layer, with caches; all are equal, so that layers compare by settings."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.fetchers: dict[Device, tuple[Any, Fetcher]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Work)

    def __hash__(self) -> int:
        return 0


class Staged(Wrapper):
    """Computes the layer inside stage by stage, each on the device of its place."""

    places: tuple[Place, ...]
    microbatches: int = 1
    compiles: bool = True

    work: Any = None

    def settings_fit(self) -> None:
        stages: list[Stage] = []
        for step, place in zip(steps_of(self.layer), self.places, strict=True):
            if stages and stages[-1].place == place:
                stages[-1] = replace(stages[-1], steps=(*stages[-1].steps, step))
            else:
                stages.append(Stage(place, (step,)))
        object.__setattr__(self, "work", _Work(tuple(stages)))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The layers, as they lie."""
        return self.work.stages

    @property
    def label(self) -> str:
        return f"{self.layer.label}, pipelined"

    @property
    def alone(self) -> Layer:
        return self.layer

    def like(self, parameters: Parameters) -> Parameters:
        place, first = self.stages[0].place, first_leaf(parameters)
        owner = owner_of(first)
        if not place.held or owner is None:
            return parameters
        engine = registry.load(str(place.device.engine))
        return engine.empty((1,), owner.dtype_of(first), place.device)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the stages, in order."""
        return tuple(stage.place.device for stage in self.stages)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        if run.training:  # a step writes to weights that were brought ahead
            self.work.fetchers.clear()
        for number, stage in enumerate(self.stages):
            own = [step.parameters_in(parameters) for step in stage.steps]
            if number:  # the input is to be where the first stage is
                x = moved(x, stage.place.device)
            if not stage.place.held:
                x = self._compute_stage(stage, own, x, run)
            elif run.training or _takes_gradients(x, own):
                x = _brought_again(stage, own, x, run)
            else:
                x = self._fetch_stage(number, parameters, x, run)
        return x

    def _compute_stage(self, stage: Stage, own: list[Parameters], x: Array, run: Run) -> Array:
        """Return the output of a stage, compiled as a whole where gradients can be taken inside."""
        autodiff = autodiff_of(x)
        if run.watch is not None or autodiff is None or not autodiff.compiles or not self.compiles:
            return _apply_steps(stage.steps, own, x, _run_on(stage.place.device, run))
        key = stage, run.training, run.path, run.frozen, run.rows
        if key not in self.work.functions:
            self.work.functions[key] = _compile_stage(stage, run)
        x, updates = self.work.functions[key](own, x, run.seed, run.step)
        if run.updates is not None:
            run.updates.update({tuple(name.split("\0")): new for name, new in updates.items()})
        return x

    def _fetch_stage(self, number: int, parameters: Parameters, x: Array, run: Run) -> Array:
        """Return the output of a stage; its layers are brought one ahead."""
        stage = self.stages[number]
        fetcher, parts = self._fetcher(stage.place.device, parameters)
        with fetcher.turn.native:
            for at, step in enumerate(stage.steps):
                given, unit = step.parameters_in(parameters), parts.get((number, at))
                if unit is None:
                    x = run.through(step.path, step.layer, given, x)
                    continue
                here = refilled(given, fetcher.acquire(unit))
                try:
                    x = run.through(step.path, step.layer, here, x)
                finally:
                    fetcher.release(unit, x)
        return x

    def _fetcher(self, device: Device, parameters: Parameters) -> tuple[Fetcher, dict[Any, int]]:
        """Return the fetcher of a device, and the number of each layer by stage and index."""
        offloaded = {
            (number, at): arrays
            for number, stage in enumerate(self.stages)
            if stage.place.held and stage.place.device == device
            for at, step in enumerate(stage.steps)
            if (arrays := leaves(step.parameters_in(parameters)))
        }
        key = [id(x) for arrays in offloaded.values() for x in arrays]
        known = self.work.fetchers.get(device)
        if known is None or known[0] != key:
            parts = [[_kept_array(x) for x in arrays] for arrays in offloaded.values()]
            known = key, Fetcher(parts, device, registry.load(str(device.engine)))
            self.work.fetchers[device] = known
        return known[1], {place: part for part, place in enumerate(offloaded)}


def steps_of(layer: Layer, path: str = "", keys: tuple[str | int, ...] = ()) -> list[PlacedStep]:
    """Return the steps between which a layer can be cut: layers of chains, in any depth."""
    if isinstance(layer, Chain):
        parts = enumerate(layer.parts)
        return [s for at, (step, part) in parts for s in steps_of(part, path + step, (*keys, at))]
    if isinstance(layer, Recomputed):
        inside = steps_of(layer.layer, path, keys)
        return [replace(step, layer=Recomputed(step.layer)) for step in inside]
    if isinstance(layer, TiedEmbedding):
        matrix = (*keys, "weight")
        inside = steps_of(layer.inside, f"{path}.inside", (*keys, "inside"))
        return [
            PlacedStep(path, _Embedded(), matrix),
            *inside,
            PlacedStep(path, _Projected(), matrix),
        ]
    return [PlacedStep(path, layer, keys)]


def _pipeline_model(
    model: Model,
    given: Places,
    microbatches: int,
    folder: str | os.PathLike[str] | None,
) -> Model:
    inner = model.layer.alone
    steps = steps_of(inner)
    units = _units(steps, model.parameters)
    owner = owner_of(next(iter(leaves(model.parameters)), None))
    places, engine = placed_units(
        units, given, None if owner is None else owner.name, model.parameter_count
    )
    by_keys: dict[Any, Place] = {}
    for at, step in enumerate(steps):  # a matrix that is used twice is in one place
        places[at] = by_keys.setdefault(step.keys, places[at])
    target = folder_for(folder, places)
    parameters = _place_parameters(model.parameters, steps, places, engine, target)
    staged = Staged(inner, tuple(places), microbatches)
    return bound(staged, model.input_shape, parameters, model.frozen)


def _units(steps: Sequence[PlacedStep], parameters: Parameters) -> list[Unit]:
    """Return the units of a model. Plans count its blocks, else all units with parameters."""
    counted: set[Any] = set()
    units = []
    blocks = any(_is_block(step.layer) for step in steps)
    for step in steps:
        own = [] if step.keys in counted else leaves(step.parameters_in(parameters))
        counted.add(step.keys)
        size = sum(prod(x.shape) * x.dtype.itemsize for x in own)
        units.append(Unit(step.path, size, _is_block(step.layer) if blocks else bool(size)))
    return units


def _is_block(layer: Layer) -> bool:
    inside = layer.layer if isinstance(layer, Recomputed) else layer
    return bool(inside.parts)


def _place_parameters(
    parameters: Parameters,
    steps: Sequence[PlacedStep],
    places: Sequence[Place],
    engine: str,
    folder: Path | None,
) -> Parameters:
    """Return the parameters, placed by their steps."""
    names, arrays = leaf_names(parameters), leaves(parameters)
    numbered = refilled(parameters, range(len(arrays)))
    where: dict[int, Place] = {}
    for step, place in zip(steps, places, strict=True):
        for at in leaves(step.parameters_in(numbered)):
            where[at] = place
    on_file = {at for at, place in where.items() if place.held == DISK}
    stored = {names[at]: to_numpy(arrays[at]) for at in sorted(on_file)}
    files = {} if folder is None else memory_maps(on_disk(folder, stored))
    host = Device("cpu", engine=engine)
    placed = [
        files[name]
        if at in on_file
        else to_device(x, host if where[at].held else where[at].device, convert=True)
        for at, (name, x) in enumerate(zip(names, arrays, strict=True))
    ]
    return refilled(parameters, placed)


def memory_maps(entries: Mapping[str, KeptArray]) -> dict[str, Any]:
    """Return NumPy arrays that are memory maps of a file."""
    import numpy

    maps: dict[str, Any] = {}
    for name, array in entries.items():
        assert array.file is not None, "only arrays in files are mapped"
        with open(array.file.number, "rb", closefd=False) as file:
            maps[name] = numpy.memmap(file, array.dtype.numpy(), "r", array.start, array.shape)
        setattr(maps[name], _KEPT, array)
    return maps


_KEPT = "_anydevice_kept"


def _kept_array(x: Array) -> KeptArray:
    """Return the place of an array: a file if it is a memory map, else host memory."""
    entry, owner = getattr(x, _KEPT, None), owner_of(x)
    assert owner is not None
    return kept_in_memory(x, owner) if entry is None else replace(entry, holder=x)


def _takes_gradients(x: Array, own: Sequence[Parameters]) -> bool:
    """Whether gradients are taken through a stage, whose weights must then stay."""
    owner = owner_of(x)
    arrays = [x, *leaves(own)]
    if owner is not None and any(owner.is_traced(y) for y in arrays if owner.owns(y)):
        return True
    return registry.loaded("torch") and bool(part("torch", "pipeline").takes_gradients(arrays))


def _run_on(device: Device, run: Run) -> Run:
    """Return a run with its seed and step on a device."""
    seed, step = (moved(x, device) for x in (run.seed, run.step))
    return replace(run, seed=seed, step=step)


def _apply_steps(
    steps: Sequence[PlacedStep], own: Sequence[Parameters], x: Array, run: Run
) -> Array:
    for step, parameters in zip(steps, own, strict=True):
        x = run.through(step.path, step.layer, parameters, x)
    return x


def _compile_stage(stage: Stage, run: Run) -> Callable[..., Any]:
    """Return a stage as a compiled function of its parameters, input, seed and step."""
    training, path, frozen, rows = run.training, run.path, run.frozen, run.rows

    def stage_function(own: list[Parameters], x: Array, seed: Any, step: Any) -> Any:
        updates: dict[tuple[str, str], Array] = {}
        here = Run(training, seed, step, path, None, updates, frozen, rows)
        result = _apply_steps(stage.steps, own, x, here)
        return result, {"\0".join(name): new for name, new in updates.items()}

    engine = registry.load(str(stage.place.device.engine))
    compilers = compilers_for(engine, "default").compilers
    if not compilers:
        return stage_function
    return FallbackFunction(
        stage_function, compilers, lambda text: warn(f"a stage of a pipeline is {text}")
    )


def _brought_again(stage: Stage, own: Sequence[Parameters], x: Array, run: Run) -> Array:
    """Return the output of a stage in training: a layer is brought again for its gradient."""
    device, autodiff = stage.place.device, autodiff_of(x)
    run = _run_on(device, run)
    engine = registry.load(str(device.engine))

    def brought(x: Array) -> Array:
        return moved(x, device) if engine.owns(x) else engine.place(x, device)

    def applied(step: PlacedStep, given: Parameters, x: Array) -> Array:
        here = refilled(given, [brought(x) for x in leaves(given)])
        return run.through(step.path, step.layer, here, x)

    for step, given in zip(stage.steps, own, strict=True):
        function = partial(applied, step)
        again = autodiff is not None and leaves(given) and not state_places(step.layer)
        x = (autodiff.checkpoint(function) if again and autodiff else function)(given, x)
    return x
