"""Several devices, and several processes: meshes, data and models over them, and starting them.

    from anydevice import nn, parallel

    mesh = parallel.initialize()
    nn.train(model, data, nn.AdamW(1e-3), "cross_entropy", epochs=3, devices=mesh)

Every name loads when it is first used.
"""

from __future__ import annotations

from anydevice.core.lazy import lazy_names as _lazy_names

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

_MODULES = {
    "parallel.launching": "launch",
    "parallel.mesh": "Mesh",
    "parallel.pipelines": "pipeline",
    "parallel.placing": "gather replicate shard split_batch",
    "parallel.processes": "initialize",
}
"""The public names by module."""

__all__, __getattr__, __dir__ = _lazy_names(__name__, _MODULES)
