"""Tables of pandas and polars are arrays of their rows, wherever data is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import polars
import pytest

import anydevice
from anydevice import nn
from anydevice._train.batches import pair_of
from anydevice.errors import ConfigurationError, TransferError
from tests.comparing import assert_same_bits

Make = Callable[[dict[str, Any]], Any]
LIBRARIES = {"pandas": pandas.DataFrame, "polars": polars.DataFrame}
NUMBERS = {"age": [1, 2, 3], "height": [0.5, 1.5, 2.5], "is_new": [True, False, True]}
ROWS = np.array([[1, 0.5, 1], [2, 1.5, 0], [3, 2.5, 1]])


def model(x: Any) -> Any:
    return nn.build(nn.Dense(3, 2), device="cpu")(x)


def compiled(x: Any) -> Any:
    layers = nn.build(nn.Dense(3, 2), device="cpu")
    return anydevice.compile(layers, "cpu", optimize="none")(x)


TAKERS: dict[str, Callable[[Any], Any]] = {
    "device": lambda df: anydevice.device("cpu")(df),
    "to_numpy": anydevice.to_numpy,
    "model": model,
    "compiled": compiled,
    "Batches": lambda df: nn.Batches(df, [0, 0, 1], size=3),
    "a batch of nn.train": lambda df: pair_of((df, [0, 0, 1])),
}


@pytest.fixture(params=LIBRARIES)
def make(request: pytest.FixtureRequest) -> Make:
    return LIBRARIES[request.param]


@pytest.mark.needs("torch")
def test_a_table_is_one_array_of_rows_and_columns(make: Make) -> None:
    table = make(NUMBERS)
    there = anydevice.device("cpu", engine="torch")({"x": table, "y": table["age"]})
    assert {type(x).__module__ for x in there.values()} == {"torch"}
    assert_same_bits(there["x"].numpy(), ROWS, because="it is only copied")
    assert there["y"].tolist() == [1, 2, 3]
    assert anydevice.to_numpy(table["is_new"]).dtype == bool
    assert anydevice.to_numpy(make({"a": [1], "b": [True]})).dtype == np.int64
    assert anydevice.device_of([table]) == anydevice.Device("cpu")


def test_the_same_is_computed_of_a_table_and_its_rows(make: Make) -> None:
    table, rows = make(NUMBERS), ROWS.astype("float32")
    for function in (model, compiled):
        assert_same_bits(function(table), function(rows), because="it is only copied")
    batches = nn.Batches(table, table["age"], size=2, shuffle=False)
    ((x, y), (last, _)) = batches(seed=0, epoch=1)
    assert_same_bits(np.concatenate([x, last]), ROWS, because="it is only copied")
    assert y.tolist() == [1, 2]
    x, y = pair_of((table, table["age"]))
    assert_same_bits(x, rows, because="it is only copied")
    assert (x.dtype, y.tolist()) == (np.float32, [1, 2, 3])


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    ("column", "match"),
    [
        (["a", "b", "c"], "the column 'city'.*not numbers"),
        ([1, None, 3], "the column 'city'.*missing values"),
        (np.array([2**63 + 1, 1, 2], "uint64"), "the column 'city'.*float64 does not hold"),
    ],
    ids=["text", "missing", "wide"],
)
def test_a_refusal_names_the_column(make: Make, taker: str, column: Any, match: str) -> None:
    if column[1] is None and make is pandas.DataFrame:
        column = pandas.array(column, dtype="Int64")  # else pandas itself makes it NaN
    table = make({"age": [1, 2, 3], "city": column, "height": [0.5, 1.5, 2.5]})
    with pytest.raises((TransferError, ConfigurationError), match=match):
        TAKERS[taker](table)


def test_the_path_of_a_table_in_a_tree_is_named(make: Make) -> None:
    tree = {"data": [make({"a": [1]}), make({"name": ["x"]})]}
    with pytest.raises(TransferError, match=r"^\['data'\]\[1\]: the column 'name'") as caught:
        anydevice.to_device(tree, "cpu")
    assert caught.value.path == "['data'][1]"


def test_a_lazy_frame_is_collected_first() -> None:
    lazy = polars.DataFrame(NUMBERS).lazy()
    for take in (anydevice.device("cpu"), model, lambda df: nn.Batches(df, [0], size=1)):
        with pytest.raises((TransferError, ConfigurationError), match=r"collect\(\)"):
            take(lazy)


def test_columns_of_other_kinds() -> None:
    twice = pandas.DataFrame([[1, 2.5]], columns=["a", "a"])
    assert anydevice.to_numpy(twice).tolist() == [[1.0, 2.5]]
    no_rows = pandas.DataFrame({"a": np.ones(0, "float32")})
    assert anydevice.to_numpy(no_rows).shape == (0, 1)
    assert anydevice.to_numpy(polars.DataFrame()).shape == (0, 0)
    times = pandas.DataFrame({"when": pandas.to_datetime(["2020-01-01"])})
    lists = polars.DataFrame({"v": [[1, 2]]}, schema={"v": polars.Array(polars.Int64, 2)})
    for table, name in ((times, "when"), (lists, "v")):
        with pytest.raises(TransferError, match=f"the column '{name}'"):
            anydevice.to_numpy(table)
