"""Models that are already in the local Hugging Face cache, found by the names of its folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from anydevice.errors import ConfigurationError
from anydevice.memory.shapes import shortened

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = (".json", ".safetensors")


def locate(model: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where a model lies that is named by a path or by its name on the Hugging Face hub.

    A path that exists goes first. A name is looked for in the cache that the hub's own tools fill:
    only its files are read, nothing is fetched. Raises `ConfigurationError` where the model is
    nowhere, with how to get the one file that is needed.

    >>> locate("nobody/no-model", {"HF_HUB_CACHE": "/nowhere"})
    Traceback (most recent call last):
    anydevice.errors.ConfigurationError: nobody/no-model: there is no such file or folder, and \
no such model in the Hugging Face cache /nowhere; to get the one file that is needed: \
hf download nobody/no-model config.json
    """
    path = _existing(model)
    if path is not None:
        return path
    said = shortened(model)
    if not _NAME.fullmatch(model) or model.endswith(_FILES):
        raise ConfigurationError(
            f"{said}: there is no such file or folder; write the path of a config.json, of its "
            "folder, or the name of a model in the Hugging Face cache, such as 'org/name'",
            model,
        )
    cache = _cache(environment)
    for snapshot in _snapshots(cache / f"models--{model.replace('/', '--')}"):
        if (snapshot / "config.json").exists() or any(snapshot.glob("*.safetensors")):
            return snapshot
    raise ConfigurationError(
        f"{said}: there is no such file or folder, and no such model in the Hugging Face cache "
        f"{cache}; to get the one file that is needed: hf download {said} config.json",
        model,
    )


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None  # no file can be called this, or there is no such user


def _cache(environment: Mapping[str, str]) -> Path:
    direct = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if direct:
        return Path(direct).expanduser()
    home = environment.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "huggingface" / "hub"


def _snapshots(repository: Path) -> Iterator[Path]:
    """The downloaded states of a repository: that of its main branch, then the newest ones."""
    try:
        commit = (repository / "refs" / "main").read_text("utf-8").strip()
        if commit:
            yield repository / "snapshots" / commit
    except OSError:
        pass  # a single commit may have been asked for by its number
    try:
        folders = list((repository / "snapshots").iterdir())
    except OSError:
        return  # no such model, or none can be called this
    yield from sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
