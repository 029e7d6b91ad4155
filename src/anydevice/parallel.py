"""Several devices and processes: meshes, data and models spread over them, and a launcher.

    from anydevice import nn, parallel

    mesh = parallel.initialize()
    nn.train(model, data, nn.AdamW(1e-3), "cross_entropy", epochs=3, devices=mesh)

Every name loads when it is first used.
"""

from __future__ import annotations

from anydevice._core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice._parallel.launch import launch as launch
    from anydevice._parallel.mesh import Mesh as Mesh
    from anydevice._parallel.pipeline import pipeline as pipeline
    from anydevice._parallel.placing import gather as gather
    from anydevice._parallel.placing import replicate as replicate
    from anydevice._parallel.placing import shard as shard
    from anydevice._parallel.placing import split_batch as split_batch
    from anydevice._parallel.processes import initialize as initialize

_MODULES = {
    "_parallel.launch": "launch",
    "_parallel.mesh": "Mesh",
    "_parallel.pipeline": "pipeline",
    "_parallel.placing": "gather replicate shard split_batch",
    "_parallel.processes": "initialize",
}
"""The public names by module."""

__all__, __getattr__, __dir__ = _lazy_names(__name__, _MODULES)
