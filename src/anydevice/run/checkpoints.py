"""A training in a file: all that it needs to go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice.core.device import Device
from anydevice.core.record import Record, replace
from anydevice.errors import ConfigurationError, TransferError
from anydevice.nn.trees import leaves
from anydevice.run import tensor_files
from anydevice.run.batches import sizes_of
from anydevice.run.history import History
from anydevice.run.sameness import difference, likeness
from anydevice.run.steps import Recipe, Standing

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
    recipe: Recipe, seed: int, schedule: Any, data: Any, judge: Any = None
) -> dict[str, Any]:
    """What must be the same when a training is resumed, as JSON.

    `judge` is the data whose loss patience goes by.
    """
    return {
        "layer": likeness(recipe.layer),
        "loss": likeness(recipe.loss),
        "optimizer": likeness(recipe.optimizer),
        "schedule": likeness(schedule),
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
