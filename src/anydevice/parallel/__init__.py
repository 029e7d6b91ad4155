"""Several devices, and several processes: meshes, data and models over them, and starting them.

    from anydevice import nn, parallel

    mesh = parallel.initialize()
    nn.train(model, data, nn.AdamW(1e-3), "cross_entropy", epochs=3, devices=mesh)

Every name loads when it is first used.
"""

from __future__ import annotations

from importlib import import_module as _import_module

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice.parallel.launching import launch as launch
    from anydevice.parallel.mesh import Mesh as Mesh
    from anydevice.parallel.pipelines import pipeline as pipeline
    from anydevice.parallel.placing import gather as gather
    from anydevice.parallel.placing import replicate as replicate
    from anydevice.parallel.placing import shard as shard
    from anydevice.parallel.placing import split_batch as split_batch
    from anydevice.parallel.processes import initialize as initialize

_NAMES = {
    "Mesh": "mesh",
    "gather": "placing",
    "initialize": "processes",
    "launch": "launching",
    "pipeline": "pipelines",
    "replicate": "placing",
    "shard": "placing",
    "split_batch": "placing",
}

__all__ = [
    "Mesh",
    "gather",
    "initialize",
    "launch",
    "pipeline",
    "replicate",
    "shard",
    "split_batch",
]


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
