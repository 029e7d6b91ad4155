"""A training in a file: all that it needs to go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice.core.device import Device
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError, TransferError
from anydevice.nn.trees import leaves
from anydevice.run import tensor_files
from anydevice.run.descriptions import description
from anydevice.run.history import History
from anydevice.run.steps import Recipe, Standing

_KIND = "training"


class Place(Record):
    """Where in the data a training is, and what it knows of its course.

    `epoch` counts from 1, `position` is how many batches of it were used. `lost` is the sum of
    their losses, each counted for as often as it has examples, `examples` how many those are.
    `best` is the least loss that was seen at the end of an epoch, `waited` for how many epochs it
    has not become less.
    """

    epoch: int = 1
    position: int = 0
    lost: float = 0.0
    examples: int = 0
    seconds: float = 0.0
    history: History = History()
    best: float | None = None
    waited: int = 0


class Checkpoint(Record):
    """What a file holds: the arrays, the place, and the best parameters where they are kept."""

    standing: Standing
    place: Place
    best: Any = None


def settings_of(recipe: Recipe, seed: int) -> dict[str, Any]:
    """What must be the same when a training is resumed, as JSON."""
    return {
        "layer": _described(recipe.layer),
        "loss": getattr(recipe.loss, "__qualname__", type(recipe.loss).__name__),
        "optimizer": _described(recipe.optimizer),
        "precision": str(recipe.policy),
        "clip": recipe.clip,
        "accumulate": recipe.accumulate,
        "seed": seed,
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


def read_checkpoint(
    path: Path, settings: Mapping[str, Any], like: Any, device: Device
) -> Checkpoint:
    """What `write_checkpoint` wrote, on a device.

    Raises `TransferError` where the file is damaged, newer or of another kind, and
    `ConfigurationError` where it is that of another training: it names what differs.
    """
    contents = tensor_files.read(path, _KIND, device)
    saved = contents.said["settings"]
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ConfigurationError(
                f"{path} is that of another training: its {name} was {_short(saved.get(name))}, "
                f"and now it is {_short(value)}; give what was given then, or another path",
                source="resume",
            )
    parameters = contents.trees["parameters"]
    if [tuple(x.shape) for x in leaves(parameters)] != [tuple(x.shape) for x in leaves(like)]:
        raise TransferError(f"{path}: its parameters have not the shapes of the model's")
    place = dict(contents.said["place"])
    place["history"] = History.from_list(place["history"])
    standing = Standing(
        parameters,
        contents.trees["state"],
        contents.said["batches"],
        contents.said["started"],
        contents.said["steps"],
        contents.trees["scale"],
    )
    return Checkpoint(standing, Place(**place), contents.trees["best"])


def _described(record: Any) -> Any:
    try:
        return description(record)
    except ConfigurationError:  # only compared, never made again, so its text is enough
        return repr(record)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:119]}…"
