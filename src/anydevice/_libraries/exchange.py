"""Processes that exchange numbers through the host, as in JAX and MLX."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from typing import Any

import numpy as np

from anydevice._arrays.move import to_numpy
from anydevice._core.protocols import Processes
from anydevice._core.trees import Tree, leaves
from anydevice._libraries.group import seal, unseal


class HostExchange(Processes):
    """Processes with a library that gathers host numbers; everything else builds on that."""

    key, messages, calls = b"", 0, 0  # of the class: a process is in one group of a library

    @abstractmethod
    def every(self, numbers: Any) -> Any:
        """Return the numbers of each process, one row each; shapes must be equal."""

    def wait(self) -> None:
        """Wait until every process has called this."""
        self.every(np.zeros(1, np.int32))

    def of_first(self, value: Any, root: int = 0) -> Any:
        """Broadcast a value of JSON from process `root`, by default the first."""
        text, kind = json.dumps(value).encode(), type(self)
        # Every library gathers 32-bit integers; a length that was forged fails at the HMAC.
        length = int(self.every(np.asarray([-(-len(text) // 4)], np.int32))[root, 0]) % 2**26
        kind.messages += 1
        name = f"message {kind.messages} of rank {root}"
        text = seal(kind.key, name, text[: 4 * length].ljust(4 * length))
        rows = self.every(np.frombuffer(text, np.int32))
        return json.loads(unseal(kind.key, name, rows[root].tobytes()))

    def largest(self, number: float) -> float:
        return float(self.every(np.asarray([number])).max())

    def gather(self, name: str, value: bytes) -> list[bytes]:
        """Return the bytes of each process, for `group.prove`."""
        return [row.tobytes() for row in self.every(np.frombuffer(value, np.int32))]

    def is_same(self, tree: Tree) -> bool:
        """Whether a tree, which each process can read, has the same numbers in all of them."""
        digests = self.every(np.frombuffer(digest_of(tree), np.int32))
        return bool((digests == digests[:1]).all())


def digest_of(tree: Tree) -> bytes:
    """Return a hash of the shapes and numbers of a tree of arrays."""
    digest = hashlib.sha256()
    for x in leaves(tree):
        digest.update(repr(tuple(x.shape)).encode())
        digest.update(np.ascontiguousarray(to_numpy(x)).tobytes())
    return digest.digest()
