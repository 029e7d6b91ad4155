"""Processes that exchange numbers through the host, as in JAX and MLX."""

from __future__ import annotations

import hashlib
import pickle
from abc import abstractmethod
from typing import Any

import numpy as np

from anydevice._arrays.move import to_numpy
from anydevice._core.protocols import Processes
from anydevice._core.trees import Tree, leaves


class HostExchange(Processes):
    """Processes with a library that gathers host numbers; everything else builds on that."""

    @abstractmethod
    def every(self, numbers: Any) -> Any:
        """Return the numbers of each process, one row each; shapes must be equal."""

    def wait(self) -> None:
        """Wait until every process has called this."""
        self.every(np.zeros(1, np.int32))

    def of_first(self, value: Any, root: int = 0) -> Any:
        """Broadcast a small value from process `root`, by default the first."""
        text = np.frombuffer(pickle.dumps(value), np.uint8)
        length = int(self.every(np.asarray([len(text)], np.int32))[root, 0])
        text = np.resize(text, length) if len(text) != length else text
        # Every library gathers 32-bit integers.
        return pickle.loads(self.every(text.astype(np.int32))[root].astype(np.uint8).tobytes())

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
