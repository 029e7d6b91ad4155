"""Trees of certificates while a search grows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anydevice.proofs.checking.certificate import EACH_GROUP, LEAF, Lemma, Tree, preorder

Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Branch:
    """The part of a tree below one open box, numbered by itself."""

    def __init__(self) -> None:
        self.steps: list[int] = [LEAF]
        self.first: list[int] = [0]
        self.slopes: dict[int, Bytes] = {}
        self.multipliers: dict[int, npt.NDArray[np.float16]] = {}
        self.open = 1

    def split(self, node: int, step: int) -> int:
        """The first of two new nodes."""
        first = len(self.steps)
        self.steps[node], self.first[node] = step, first
        self.steps += [LEAF, LEAF]
        self.first += [0, 0]
        self.open += 1
        return first


class Growing:
    """A tree while it grows: what was done at each node, and where its children are."""

    def __init__(self, groups: int, rows: int, neurons: int) -> None:
        self._groups, self._neurons = groups, neurons
        self._empty = np.zeros(rows, np.uint8)
        self._parts: list[tuple[Integers, Integers, Integers, Bytes]] = []
        self._slopes: dict[int, Bytes] = {}
        self._multipliers: dict[int, npt.NDArray[np.float16]] = {}
        self.lemmas: tuple[Lemma, ...] = ()
        self.nodes = 1

    def _add(self, ids: Any, steps: Any, first: Any, weights: Bytes) -> None:
        arrays = [np.asarray(each, np.int64) for each in (ids, steps, first)]
        self._parts.append((arrays[0], arrays[1], arrays[2], weights))

    def close(self, ids: Integers, weights: Bytes) -> None:
        self._add(ids, np.full(len(ids), LEAF), np.zeros(len(ids)), weights)

    def split(self, ids: Integers, inputs: Integers) -> Integers:
        """The numbers of the first of two children of each node."""
        first = self.nodes + 2 * np.arange(len(ids))
        self.nodes += 2 * len(ids)
        self._add(ids, inputs, first, np.tile(self._empty, (len(ids), 1)))
        return first

    def cases(self, box: int, weights: Bytes, of: Integers, branches: dict[int, Branch]) -> None:
        """Close a box by branches of cases of neurons, by the number of their group."""
        if self._groups == 1:
            self._graft(box, weights, branches[0])
            return
        first = self.nodes
        self.nodes += self._groups
        self._add([box], [EACH_GROUP], [first], self._empty[None])
        for group in range(self._groups):
            its = np.where(of == group, weights, 0).astype(np.uint8)
            if group in branches:
                self._graft(first + group, its, branches[group])
            else:
                self.close(np.array([first + group]), its[None])

    def _graft(self, root: int, weights: Bytes, branch: Branch) -> None:
        count = len(branch.steps)
        ids = np.concatenate([[root], self.nodes + np.arange(count - 1)])
        first = np.array(branch.first) + self.nodes - 1
        self.nodes += count - 1
        steps = np.array(branch.steps)
        is_leaf = (steps == LEAF)[:, None]
        self._add(ids, steps, first, np.where(is_leaf, weights, 0).astype(np.uint8))
        for node, slopes in branch.slopes.items():
            self._slopes[int(ids[node])] = slopes
            self._multipliers[int(ids[node])] = branch.multipliers[node]

    def tree(self) -> Tree:
        parts = zip(*self._parts, strict=True)
        ids, steps, first, weights = (np.concatenate(each) for each in parts)
        by_id = np.argsort(ids)
        order = preorder(steps[by_id], first[by_id], self._groups)
        ids, steps, weights = ids[by_id][order], steps[by_id][order], weights[by_id][order]
        leaves = steps == LEAF
        sets: dict[bytes, int] = {}
        slopes_of = np.full(int(leaves.sum()), -1)
        multipliers = [np.zeros(0, np.float16)]
        if self._slopes:
            for place, leaf in enumerate(ids[leaves].tolist()):
                if leaf in self._slopes:
                    key = self._slopes[leaf].tobytes()
                    slopes_of[place] = sets.setdefault(key, len(sets))
                    multipliers.append(self._multipliers[leaf])
        table = np.frombuffer(b"".join(sets), np.uint8)
        slopes = table.reshape(len(sets), self._neurons) if sets else np.zeros((0, 0), np.uint8)
        joined = np.concatenate(multipliers)
        return Tree(steps, weights[leaves], slopes_of, slopes, joined, self.lemmas)
