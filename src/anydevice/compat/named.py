"""Devices of anydevice under the names that another library has for them."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from anydevice import Device


class NamedDevice(Device):
    """A `Device` whose class stands for its backend: `class Card(NamedDevice, backend="cuda")`."""

    of_backend: ClassVar[str]

    def __init_subclass__(cls, backend: str = "") -> None:
        if backend:
            cls.of_backend = backend

    def __init__(
        self, index: int = 0, *, engine: str | None = None, chosen_by: str | None = None
    ) -> None:
        super().__init__(self.of_backend, index, engine=engine, chosen_by=chosen_by)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index or ''})"

    def __reduce__(self) -> tuple[object, ...]:
        options = {"engine": self.engine_asked, "chosen_by": self.chosen_by}
        return partial(type(self), self.index, **options), ()
