"""The rule of tables: a DataFrame or a Series of pandas or polars becomes an array of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anydevice._arrays.trees.rules import Parts, Rule
from anydevice.errors import ConfigurationError


class TableRule(Rule):
    """A DataFrame or a Series of pandas or polars: an array of its rows, which takes its place."""

    def take_apart(self, container: Any) -> Parts:
        return (None,), [self.array(container)]

    def step(self, key: Any) -> str:
        return ""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return parts[0]

    def array(self, table: Any) -> Any:
        """Return the rows as one NumPy array, of the smallest dtype that holds every column.

        Raises `ConfigurationError`, with the column, where that holds anything but numbers or has
        missing values, and where its integers do not fit into the floating dtype of the others.
        """
        import numpy as np  # a walk through a tree imports no library

        if hasattr(table, "collect"):
            raise ConfigurationError("a LazyFrame has no rows yet; collect() it first")
        columns = _columns(table)
        if columns is None:
            return _numbers(table)
        arrays = [_numbers(column) for column in columns]
        dtype = np.result_type(*arrays) if arrays else np.dtype("float32")
        rows = np.empty((len(table), len(arrays)), dtype)
        for at, (column, array) in enumerate(zip(columns, arrays, strict=True)):
            rows[:, at] = array
            if dtype.kind == "f" and array.dtype.kind in "iu" and array.size:
                most = 2 ** (np.finfo(dtype).nmant + 1)
                if not -most <= int(array.min()) <= int(array.max()) <= most:
                    raise _not_numbers(column, f"has integers that {dtype} does not hold")
        return rows


def _columns(table: Any) -> list[Any] | None:
    """Return the columns of a DataFrame as Series; `None` for a Series itself."""
    if hasattr(table, "get_columns"):  # polars
        return list(table.get_columns())
    return [column for _, column in table.items()] if hasattr(table, "columns") else None


def _numbers(column: Any) -> Any:
    """Return the column as an array of numbers; raises `ConfigurationError` for any other."""
    array = column.to_numpy()
    declared = _declared_kind(column.dtype)
    if declared in "biuf" and array.dtype.kind != declared:
        raise _not_numbers(column, "has missing values; fill them, or leave its rows out")
    if array.dtype.kind not in "biufc" or array.ndim != 1:
        raise _not_numbers(
            column, f"is {column.dtype}, not numbers; leave it out, or encode it as numbers"
        )
    return array


def _declared_kind(dtype: Any) -> str:
    """Return the kind of numbers that a column is to hold, as NumPy writes it; "O" for anything
    else.
    """
    if hasattr(dtype, "kind"):  # of pandas
        return str(dtype.kind)
    integer = "u" if dtype.is_unsigned_integer() else "i"
    known = {"Boolean": "b", "Float32": "f", "Float64": "f"}
    return integer if dtype.is_integer() else known.get(str(dtype), "O")


def _not_numbers(column: Any, what: str) -> ConfigurationError:
    name = "this Series" if column.name in (None, "") else f"the column {column.name!r}"
    return ConfigurationError(f"{name} {what}")
