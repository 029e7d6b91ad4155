"""Variables that a setting puts into the environment, and what was there before."""

from __future__ import annotations

import os
from collections.abc import Mapping


class Variables:
    """What one setting has put into the environment of this process.

    A variable that somebody else has changed since is theirs: it is left as it is.

    >>> ours = Variables()
    >>> ours.put({"SOME_SWITCH": "1"})
    ['SOME_SWITCH']
    >>> ours.put({}), "SOME_SWITCH" in os.environ
    (['SOME_SWITCH'], False)
    """

    def __init__(self) -> None:
        self._put: dict[str, str | None] = {}
        self._before: dict[str, str | None] = {}

    def __bool__(self) -> bool:
        return bool(self._put)

    def before(self, name: str) -> str | None:
        """The value that a variable would have without this setting; `None` where it has none."""
        now = os.environ.get(name)
        ours = name in self._put and now == self._put[name]
        return self._before[name] if ours else now

    def put(self, variables: Mapping[str, str | None]) -> list[str]:
        """Let the setting stand for exactly these variables, where `None` removes one.

        Those that it stood for and no longer does are again as they were before. Returns the names
        whose value is now another.
        """
        changed = []
        for name in dict.fromkeys((*self._put, *variables)):
            before = self.before(name)
            value = variables.get(name) if name in variables else before
            if name in variables:
                self._put[name], self._before[name] = value, before
            else:
                del self._put[name], self._before[name]
            if os.environ.get(name) != value:
                changed.append(name)
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        return changed
