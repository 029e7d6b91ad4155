"""Rows divided over devices, arrays sharded over a mesh and gathered again, copies of models."""

from __future__ import annotations

import numpy as np
import pytest

import anydevice
from anydevice import parallel
from anydevice.errors import ConfigurationError, DeviceNotFoundError, UnsupportedError
from tests.comparing import assert_same_bits
from tests.eight_devices import on_eight_devices
from tests.programs import output_of


def test_rows_that_do_not_divide_evenly_are_more_in_the_first_parts() -> None:
    data = {"x": np.arange(100.0).reshape(50, 2), "y": np.arange(50)}
    parts = parallel.split_batch(data, ["cpu"] * 4)
    assert [len(part["y"]) for part in parts] == [13, 13, 12, 12]
    assert [len(part) for part in parallel.split_batch(np.ones(2), ["cpu"] * 3)] == [1, 1, 0]
    whole = np.concatenate([anydevice.to_numpy(part["x"]) for part in parts])
    assert_same_bits(whole, data["x"], because="the rows were divided and joined")


def test_arrays_with_unequal_rows_are_no_batch() -> None:
    with pytest.raises(ConfigurationError, match=r"same number of rows; they are .*\(3,\).*\(4,\)"):
        parallel.split_batch((np.ones(3), np.ones(4)), ["cpu"])
    with pytest.raises(ConfigurationError, match="name at least one"):
        parallel.split_batch(np.ones(3), [])


def test_a_replicated_module_of_torch_leaves_the_given_one_alone() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    one, other = parallel.replicate(model, ["cpu", "cpu"])
    with torch.no_grad():
        one.weight.zero_()
    assert model.weight.abs().sum() > 0
    assert_same_bits(other.weight, model.weight, because="it is a copy")


def test_a_mesh_of_one_is_a_value_of_any_engine() -> None:
    assert parallel.Mesh("cpu:0") == parallel.Mesh(["cpu:0"], replicate=1)
    mesh = parallel.Mesh([anydevice.device("cpu", engine="numpy")])
    assert (mesh.size, mesh.rank, mesh.replicate, mesh.shard) == (1, 0, 1, 1)
    tree = {"a": np.arange(6.0)}
    whole = parallel.gather(parallel.shard(tree, mesh))
    assert_same_bits(whole["a"], tree["a"], because="it was divided and joined")


def test_several_devices_in_one_process_need_an_engine_that_can() -> None:
    numpy = anydevice.device("cpu", engine="numpy")
    with pytest.raises(UnsupportedError, match="numpy drives one device a process") as seen:
        parallel.Mesh([numpy, numpy])
    assert seen.value.absent is not None
    assert "anydevice launch -n" in seen.value.absent.instead


def test_wrong_meshes_say_what_is_wrong() -> None:
    with pytest.raises(ConfigurationError, match=r"2 times shard=3 is 6, .* devices is 1, "):
        parallel.Mesh("cpu:0", replicate=2, shard=3)
    with pytest.raises(ConfigurationError, match="shard must be an integer of 1 or more"):
        parallel.Mesh("cpu:0", shard=0)
    with pytest.raises(ConfigurationError, match="devices= is empty"):
        parallel.Mesh([])
    with pytest.raises(DeviceNotFoundError):
        parallel.Mesh(["cpu:0", "cpu:99"])


def test_the_module_imports_no_array_library() -> None:
    program = (
        "import sys; from anydevice import parallel; dir(parallel);"
        "print([m for m in ('numpy', 'torch', 'jax', 'mlx') if m in sys.modules])"
    )
    assert output_of("-c", program).strip() == "[]"


SHARDED = """
import numpy as np, anydevice
from anydevice import nn, parallel
from anydevice._libraries.jax.mesh import bytes_a_device

mesh = parallel.Mesh("cpu", shard=8)
assert (mesh.size, mesh.rank, mesh.replicate, mesh.shard) == (8, 0, 1, 8)
model = nn.build(nn.Dense(64, 256), "gelu", nn.Dense(256, 256), "gelu", nn.Dense(256, 10), seed=1,
                 device=anydevice.device("cpu", engine="numpy"))
tree = parallel.shard(model.parameters, mesh)
whole = anydevice.to_numpy(tree)
ideal = model.parameter_count * 4 / 8
bytes = bytes_a_device(tree)
assert len(bytes) == 8, bytes
assert max(bytes.values()) <= 1.05 * ideal, (bytes, ideal)

back = parallel.gather(tree)
assert str(anydevice.device_of(back)) == "cpu"
for a, b in zip(anydevice._core.trees.leaves(back), anydevice._core.trees.leaves(model.parameters)):
    np.testing.assert_array_equal(np.asarray(a), b)

# Two groups of four: half as many bytes are saved, and everything is there twice.
mixed = bytes_a_device(parallel.shard(model.parameters, parallel.Mesh("cpu", replicate=2, shard=4)))
assert max(mixed.values()) <= 1.05 * 2 * ideal, mixed
assert sum(mixed.values()) >= 2 * model.parameter_count * 4

# A sharded tree goes to another mesh.
fewer = parallel.shard(tree, parallel.Mesh(["cpu:0", "cpu:1"], shard=2))
assert len(bytes_a_device(fewer)) == 2

parts = parallel.split_batch(np.arange(50), parallel.Mesh("cpu"))
assert [len(part) for part in parts] == [7, 7, 6, 6, 6, 6, 6, 6]
assert [str(anydevice.device_of(part)) for part in parts][1:] == [f"cpu:{i}" for i in range(1, 8)]
copies = parallel.replicate(model, mesh)
assert [str(anydevice.device_of(each)) for each in copies][7] == "cpu:7"
print("held")
"""


def test_eight_devices_of_jax_hold_an_eighth_each() -> None:
    pytest.importorskip("jax")
    assert on_eight_devices(SHARDED).strip() == "held"
