"""One test item for many combinations of arguments, which names every one that fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import product
from typing import Any

import pytest

from anydevice._engines import host

Test = Callable[..., None]


def each(
    names: str | tuple[str, ...] = (), rows: Any = ((),), /, **axes: Iterable[Any]
) -> Callable[[Test], Test]:
    """The test runs once for every combination, in one item: `@each(dtype=FLOATS, shape=SHAPES)`.

    Arguments that belong together are rows: `@each(("left", "right"), PAIRS, dtype=FLOATS)`. Rows
    may also be a function that takes the item's other arguments by name and returns them.

    All combinations run. Those that fail are named, each with its error; the item is skipped where
    every combination is. What is refused because of a known defect of a driver is skipped too.
    """
    together = (names,) if isinstance(names, str) else names
    inner = {*together, *axes}

    def combinations(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for row in _rows(rows, given):
            values = (row,) if isinstance(names, str) else row
            for others in product(*axes.values()):
                yield dict(zip((*together, *axes), (*values, *others), strict=True))

    def decorate(test: Test) -> Test:
        @wraps(test)
        def item(**given: Any) -> None:
            failed: dict[str, BaseException] = {}
            skipped: list[str] = []
            every = list(combinations(given))
            for values in every:
                host.forget_warning()
                try:
                    test(**given, **values)
                except pytest.skip.Exception as reason:
                    skipped.append(str(reason))
                except (Exception, pytest.fail.Exception) as error:
                    if getattr(error, "code", None) == "driver_defect":
                        skipped.append(str(error))
                        continue
                    if "Timeout" in str(error):  # of the whole item
                        raise
                    failed[", ".join(f"{name}={_shown(x)}" for name, x in values.items())] = error
            if failed:
                for combination, error in failed.items():
                    error.add_note(f"with {combination}")
                told = f"{len(failed)} of {len(every)} combinations fail: {'; '.join(failed)}"
                raise BaseExceptionGroup(told, list(failed.values()))
            if len(skipped) == len(every):
                pytest.skip(skipped[0] if skipped else "no combination applies")

        signature = inspect.signature(test)
        outer = [x for name, x in signature.parameters.items() if name not in inner]
        item.__signature__ = signature.replace(parameters=outer)  # type: ignore[attr-defined]
        return item

    return decorate


def _rows(rows: Any, given: dict[str, Any]) -> Iterable[Any]:
    if not callable(rows):
        return rows
    return rows(**{name: given[name] for name in inspect.signature(rows).parameters})


def _shown(value: Any) -> str:
    text = str(getattr(value, "__name__", value))
    return text if len(text) <= 60 else f"{text[:59]}…"
