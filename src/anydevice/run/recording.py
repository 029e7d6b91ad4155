"""Listening to the parts of modules that have no hooks: their classes are changed for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anydevice.run.subjects import After

_changing = threading.Lock()


@contextmanager
def recording(parts: Mapping[str, Any], after: After) -> Iterator[None]:
    """A block in which what each of these objects gives when it is called passes through `after`.

    Python looks a call up in the class. So the classes are given another `__call__` in the block,
    which leaves all other objects of theirs alone; they get back what they had.
    """
    names = {id(part): f"{path} {type(part).__name__}" for path, part in parts.items()}
    with _changing:
        changed: list[tuple[type, Any]] = []
        try:
            for kind in {type(part): None for part in parts.values()}:
                before = kind.__dict__.get("__call__")
                type.__setattr__(kind, "__call__", _heard(kind.__call__, names, after))
                changed.append((kind, before))
            yield
        finally:
            for kind, before in reversed(changed):
                if before is None:
                    type.__delattr__(kind, "__call__")
                else:
                    type.__setattr__(kind, "__call__", before)


def _heard(original: Any, names: Mapping[int, str], after: After) -> Any:
    def call(self: Any, *inputs: Any, **named: Any) -> Any:
        result = original(self, *inputs, **named)
        name = names.get(id(self))
        return result if name is None else after(name, result)

    return call
