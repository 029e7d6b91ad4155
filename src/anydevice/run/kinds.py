"""Which kind of model is this? Asks only the libraries that are imported already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from anydevice.errors import ConfigurationError
from anydevice.nn.layer import Layer
from anydevice.nn.model import Model
from anydevice.run.jax_modules import NnxSubject, PytreeSubject
from anydevice.run.mlx_modules import MlxSubject
from anydevice.run.own_models import FunctionSubject, ModelSubject
from anydevice.run.subjects import Subject, in_words
from anydevice.run.torch_modules import TorchSubject

_MODULES: tuple[tuple[str, Callable[[Any], Subject]], ...] = (
    ("torch.nn", TorchSubject),
    ("flax.nnx", NnxSubject),
    ("mlx.nn", MlxSubject),
    ("equinox", PytreeSubject),
)
"""Where a library's class `Module` is, and what its modules are for us."""


def subject_of(model: Any) -> Subject:
    """The model as something that can be moved, compiled and checked.

    >>> subject_of(abs).kind
    'function'

    Raises `ConfigurationError` for anything that is no model and no function.
    """
    if isinstance(model, Model):
        return ModelSubject(model)
    for library, made in _MODULES:
        module = sys.modules.get(library)
        if module is not None and isinstance(model, module.Module):
            return made(model)
    if isinstance(model, Layer):
        raise ConfigurationError(
            f"{model.label} is a layer and has no parameters; make it a model with nn.Model(layer)",
            source="model",
        )
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        raise ConfigurationError(
            f"{type(model).__name__} is a module of flax.linen, whose parameters are elsewhere; "
            "compile the function lambda x: module.apply(variables, x)",
            source="model",
        )
    if isinstance(model, type):
        raise ConfigurationError(
            f"{model.__qualname__} is a class; give one of it, {model.__qualname__}(…)",
            source="model",
        )
    if not callable(model):
        inside = isinstance(getattr(model, "model", None), Model)
        instead = (
            "give its .model"
            if inside
            else "give a nn.Model, a function over arrays, or a module of PyTorch, Flax NNX, "
            "Equinox or MLX"
        )
        raise ConfigurationError(f"{in_words(model)} cannot be compiled; {instead}", source="model")
    return FunctionSubject(model)
