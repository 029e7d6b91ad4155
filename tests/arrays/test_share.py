"""Arrays that share memory share it after a move, where the library has views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anydevice import testing, to_device, to_numpy
from anydevice._arrays.move import shared_memory
from anydevice.errors import TransferError
from tests.comparing import assert_same_bits


@pytest.fixture
def gpu() -> Any:
    with testing.fake_machine(cuda=1, engines=["torch"]):
        yield "cuda:0"


def shares(a: Any, b: Any) -> bool:
    """Whether writing to one changes the other."""
    before = to_numpy(b).copy()
    a[...] = a + 1
    return bool((to_numpy(b) != before).any())


def test_views_of_one_numpy_array(gpu: str) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    moved = to_device({"whole": whole, "row": whole[1], "columns": whole[:, 1:3]}, gpu)
    assert_same_bits(moved["row"].numpy(), whole[1], because="it is only copied")
    assert_same_bits(moved["columns"].numpy(), whole[:, 1:3], because="it is only copied")
    assert shares(moved["whole"], moved["row"])
    assert shares(moved["columns"], moved["whole"])
    assert not np.shares_memory(moved["whole"].numpy(), whole)


def test_views_of_different_types(gpu: str) -> None:
    whole = np.arange(4, dtype=np.float32)
    moved = to_device([whole, whole.view(np.int32)], gpu)
    assert_same_bits(moved[1].numpy(), whole.view(np.int32), because="it is only copied")
    assert shares(moved[0], moved[1])


def test_tied_weights_of_a_state_dict(gpu: str) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    with testing.fake_machine(cuda=1, engines=["jax", "torch"]):
        moved = to_numpy(model.state_dict())
    assert np.shares_memory(moved["a.weight"], moved["b.weight"])
    assert not np.shares_memory(moved["a.bias"], moved["b.bias"])


def test_back_to_numpy() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    host = to_numpy({"whole": whole, "column": whole[:, 1]})
    assert host["column"].tolist() == [1, 5, 9]
    assert np.shares_memory(host["whole"], host["column"])


def test_what_does_not_overlap_is_moved_apart(gpu: str) -> None:
    whole = np.zeros((2, 1000), np.float32)
    moved = to_device([whole[0], whole[1]], gpu)
    assert [part.untyped_storage().nbytes() for part in moved] == [4000, 4000]
    whole = np.zeros(10_000, np.float32)
    (found,) = shared_memory([whole[:3], whole[2:4], whole[-2:]], range(3))
    assert found.memory.nbytes == 16
    assert [view.position for view in found.views] == [0, 1]


@pytest.mark.parametrize(
    "views",
    [
        lambda x: [x, x[::-1]],  # PyTorch goes no way backwards
        lambda x: [x, x.view(np.uint8)[1:5].view(np.int32)],  # and reads no number in between
        lambda x: [x.astype(">f4"), x.astype(">f4")],
        lambda x: [x[:0], x],
    ],
)
def test_what_the_library_cannot_share_is_moved_all_the_same(gpu: str, views: Any) -> None:
    arrays = views(np.arange(6, dtype=np.float32))
    for before, after in zip(arrays, to_device(arrays, gpu), strict=True):
        native = before.astype(before.dtype.newbyteorder("="))
        assert_same_bits(after.numpy(), native, because="it is only copied")


def test_an_engine_without_views_makes_copies() -> None:
    whole = np.arange(6, dtype=np.float32)
    with testing.fake_machine(cuda=1, engines=["jax"]):
        moved = to_device([whole, whole[1:3]], "cuda:0")
    assert np.asarray(moved[1]).tolist() == [1, 2]


def test_a_tensor_with_a_history_keeps_it(gpu: str) -> None:
    leaf = torch.ones(4, requires_grad=True)
    moved = to_device({"all": leaf, "some": leaf[:2]}, gpu)
    (moved["all"].sum() + moved["some"].sum()).backward()
    assert leaf.grad.tolist() == [2, 2, 1, 1]


def test_read_only_memory_is_shared_as_well(gpu: str, tmp_path: Any) -> None:
    path = tmp_path / "numbers.npy"
    np.save(path, np.arange(8, dtype=np.float32))
    mapped = np.load(path, mmap_mode="r")
    moved = to_device([mapped, mapped[2:]], gpu)
    assert_same_bits(moved[1].numpy(), mapped[2:], because="it is only copied")
    assert shares(moved[0], moved[1])


def test_columns_share_what_they_have_in_common_and_no_more(gpu: str) -> None:
    matrix = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    moved = to_device({"x": matrix[:, :3], "y": matrix[:, 3]}, gpu)
    assert_same_bits(moved["x"].numpy(), matrix[:, :3], because="it is only copied")
    assert [part.untyped_storage().nbytes() for part in moved.values()] == [200 * 3 * 4, 200 * 4]
    apart = matrix[:, 100]
    moved = to_device([matrix[:, :3], matrix[:, 2:5], apart], gpu)
    assert shares(moved[0], moved[1])
    assert_same_bits(moved[2].numpy(), apart, because="it is only copied")
    assert moved[2].untyped_storage().nbytes() == 800


def test_a_mask_is_never_lost(gpu: str) -> None:
    masked = np.ma.masked_array(np.arange(4.0), mask=[True, False, False, False])
    with pytest.raises(TransferError):
        to_device([masked, masked[1:]], gpu)


def test_what_the_library_knows_nothing_of_fails_alone_and_by_name() -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(TransferError, match=r"\['odd'\].*to_dense"):
        to_numpy({"plain": torch.ones(2), "odd": sparse})
