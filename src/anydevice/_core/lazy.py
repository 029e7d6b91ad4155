"""Public names of a package that load when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

Hint = Callable[[str], str]


def lazy_names(
    package: str,
    modules: Mapping[str, str],
    hint: Hint = lambda name: "",
    packages: Sequence[str] = (),
    deprecated: Mapping[str, str] | None = None,
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        modules: for each module, without "anydevice.", the names that it gives to the package.
        hint: returns the end of the error's sentence for a known missing name; for others, the
        closest of the package's names is suggested.
        packages: public subpackages.
        deprecated: old names, each with its new one; the first use of an old name warns.

    """
    homes = {name: module for module, names in modules.items() for name in names.split()}
    public = sorted([*homes, *packages])
    renamed = deprecated or {}

    def attribute(name: str) -> object:
        if name in packages:
            return import_module(f"{package}.{name}")  # the import sets the attribute
        current = renamed.get(name, name)
        if current not in homes:
            raise _NoSuchNameError(package, name, public, hint)
        if current != name:
            short = package.rpartition(".")[2]
            message = f"{short}.{name} is now {short}.{current}; the old name goes in 0.4"
            _warn_deprecated(message)
        value: object = getattr(import_module(f"anydevice.{homes[current]}"), current)
        setattr(sys.modules[package], name, value)
        return value

    return public, attribute, lambda: public


def moved_names(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a 0.2 module, which warns and looks in `anydevice.extend`."""

    def attribute(name: str) -> object:
        if name not in names:
            raise _NoSuchNameError(module, name, list(names), lambda name: "")
        message = f"{module}.{name} is now anydevice.extend.{names[name]}; the old name goes in 0.4"
        _warn_deprecated(message)
        return getattr(import_module("anydevice.extend"), names[name])

    return attribute


def _warn_deprecated(message: str) -> None:
    from anydevice._core.text import warn  # only needed for a warning

    warn(DeprecationWarning(message))


class _NoSuchNameError(AttributeError):
    """A missing name; its text is made on demand, as Python ignores it while importing."""

    def __init__(self, package: str, wanted: str, names: list[str], hint: Hint) -> None:
        super().__init__(package, wanted)
        self._names, self._hint = names, hint

    def __reduce__(self) -> tuple[type[AttributeError], tuple[str]]:
        return AttributeError, (str(self),)  # for example in a process pool

    def __str__(self) -> str:
        package, wanted = self.args
        hint = self._hint(wanted)
        if not hint:
            from difflib import get_close_matches

            ours = {name.lower(): name for name in self._names}  # Conv2D is closest to Conv2d
            for near in get_close_matches(wanted.lower(), ours, 1, 0.75):
                hint = f"; did you mean {package.rpartition('.')[2]}.{ours[near]}?"
        return f"module {package!r} has no attribute {wanted!r}{hint}"
