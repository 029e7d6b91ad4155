"""Trees: the arrays in any object as a list, and the object rebuilt from them.

`flatten` walks a tree once, with its own stack, so that only memory bounds its depth. Every array
and every container is visited once, however often it occurs: shared objects are shared again after
rebuilding, and tied weights are one leaf.

A container with an array, at any depth, becomes a new object, whether or not the array changes; a
container without arrays stays the same object. Modules and optimizers of PyTorch and MLX, to which
other objects refer, are changed in place, and so are the dicts and lists inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import is_
from typing import Any

from anydevice._arrays.trees.containers import ATOMS, known, rule_of
from anydevice._arrays.trees.rules import ATOM, InPlaceRule, Parts, Rule, kind_name
from anydevice._core.quantized import QuantizedWeight
from anydevice.errors import AnyDeviceError, ConfigurationError, TransferError

_MANY = 16  # parts of a container from which on it pays to take them all together
_OPEN, _EMPTY = -1, -2  # numbers of nodes that are being walked, or have no array


class Leaf:
    """One array: its `value`, and the `path` of its first occurrence, made only for errors."""

    __slots__ = ("_node", "_position", "value")

    def __init__(self, value: Any, node: _Node, position: int) -> None:
        self.value = value
        self._node = node
        self._position = position

    @property
    def path(self) -> str:
        """The path: `"layers[3].bias"`, `"['weight'][0]"`, or `""` for a bare array."""
        return self._node.path_to(self._position)

    @property
    def kept(self) -> bool:
        """Whether an object around it is changed in place, so that only its data is replaced."""
        return self._node.keeper is not None

    @property
    def is_quantized(self) -> bool:
        """Whether it is part of a quantized weight."""
        return isinstance(self._node.container, QuantizedWeight)

    def __repr__(self) -> str:
        return f"Leaf({self.path!r}, {kind_name(type(self.value))})"


class Leaves:
    """The arrays of a tree. Each `Leaf` is made on demand: many would trigger a collection."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._nodes: list[_Node] = []
        self._positions: list[int] = []

    def add(self, value: Any, node: _Node, position: int) -> None:
        self.values.append(value)
        self._nodes.append(node)
        self._positions.append(position)

    def add_all(self, node: _Node) -> None:
        self.values.extend(node.parts)
        self._nodes.extend(repeat(node, len(node.parts)))
        self._positions.extend(range(len(node.parts)))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Leaf:
        return Leaf(self.values[index], self._nodes[index], self._positions[index])

    def __iter__(self) -> Iterator[Leaf]:
        return map(Leaf, self.values, self._nodes, self._positions)


class Rebuild:
    """Rebuilds the tree from new values, one a leaf, in the order of the leaves."""

    def __init__(self, root: _Node, nodes: list[_Node], leaves: Leaves) -> None:
        self._root = root
        self._nodes = nodes
        self._leaves = leaves
        self._kept = [(node, node.keeper) for node in nodes if node.keeper]

    def __call__(self, values: Sequence[Any]) -> Any:
        """Return the tree with these values.

        Raises `TransferError`, with the path, if a container cannot be made again. If one that is
        changed in place cannot hold a value, raises before anything is changed.
        """
        new = list(values)
        if len(new) != len(self._leaves):
            raise ValueError(f"this tree has {len(self._leaves)} arrays, and {len(new)} were given")
        if self._kept:
            self._check(new)
            self._renew(new)
        built: list[Any] = []
        for node in self._nodes:
            try:
                built.append(node.made_from(node.with_nodes(node.with_leaves(new), built)))
            except (AnyDeviceError, MemoryError):
                raise
            except Exception as error:
                raise _failure("made again", node.container, node.path, error) from error
        return self._root.with_nodes(self._root.with_leaves(new), built)[0]

    def _check(self, new: list[Any]) -> None:
        """Refuse values that an object cannot hold, before anything is changed."""
        for node, (rule, container) in self._kept:
            for position, index in zip(node.leaf_positions, node.leaf_numbers, strict=True):
                value = new[index]
                if value is not self._leaves.values[index] and not rule.holds(value):
                    path = node.path_to(position)
                    raise TransferError(
                        f"{path or 'the tree'}: {rule.refusal(container, value)}", path
                    )

    def _renew(self, new: list[Any]) -> None:
        """Change the arrays that keep their identity; from then on they are the new values."""
        for node, (rule, container) in self._kept:
            if container is not node.container:
                continue
            try:
                renewed = rule.renew(container, node.keys, node.with_leaves(new))
            except (AnyDeviceError, MemoryError):
                raise
            except Exception as error:
                raise _failure("changed", container, node.path, error) from error
            for position, index in zip(node.leaf_positions, node.leaf_numbers, strict=True):
                new[index] = renewed[position]


def flatten(tree: Any, is_array: Callable[[Any], bool]) -> tuple[Leaves, Rebuild]:
    """Return the arrays of a tree, each once and in order, and a function that rebuilds it.

    `is_array` says what an array is. Any other value that is not a container stays as it is.

    Raises `TransferError`, with the path, if a tree contains itself or cannot be taken apart.
    """
    leaves = Leaves()
    nodes: list[_Node] = []
    leaf_numbers: dict[int, int] = {}  # by identity
    node_numbers: dict[int, int] = {}
    empty: list[Any] = []  # keeps objects alive: an identity is valid only while its object lives
    known_rule = known.get
    root = node = _Node(_ROOT, None, (None,), [tree], None, 0)
    while True:
        # Looked up once: the loop below runs for each part of the tree.
        place, count = node.leaf_positions.append, node.leaf_numbers.append
        for position, value in node.remaining:
            kind = type(value)
            rule = known_rule(kind) or rule_of(kind)
            if rule is ATOM:
                continue
            identity = id(value)
            if not rule.certain:
                number = leaf_numbers.get(identity)
                if number is None and is_array(value):
                    number = leaf_numbers[identity] = len(leaves)
                    leaves.add(value, node, position)
                if number is not None:
                    place(position)
                    count(number)
                    continue
            number = node_numbers.get(identity)
            if number is None:
                parts = _take_apart(rule, value, node, position)
                if parts is None:
                    continue
                if ATOMS.issuperset(map(type, parts[1])):
                    node_numbers[identity] = _EMPTY
                    empty.append(value)
                    continue
                node_numbers[identity] = _OPEN
                node = _Node(rule, value, *parts, node, position)
                if len(node.parts) >= _MANY:
                    node.take_arrays(leaves, leaf_numbers, is_array)
                break
            if number == _OPEN:
                raise _cycle(value, node, position)
            if number != _EMPTY:
                node.nodes_at.append((position, number))
        else:
            parent = node.parent
            if parent is None:
                return leaves, Rebuild(root, nodes, leaves)
            if node.leaf_numbers or node.nodes_at:
                number = node_numbers[id(node.container)] = len(nodes)
                nodes.append(node)
                parent.nodes_at.append((node.position, number))
            else:
                node_numbers[id(node.container)] = _EMPTY
                empty.append(node)
            node = parent


class _Node:
    """One container of a tree, its parts, and the positions of leaves and nodes among them."""

    __slots__ = (
        "container",
        "keeper",
        "keys",
        "leaf_numbers",
        "leaf_positions",
        "nodes_at",
        "parent",
        "parts",
        "position",
        "remaining",
        "rule",
    )

    def __init__(
        self,
        rule: Rule,
        container: Any,
        keys: Sequence[Any],
        parts: list[Any],
        parent: _Node | None,
        position: int,
    ) -> None:
        self.rule = rule
        self.container = container
        self.keys = keys
        self.parts = parts
        self.parent = parent
        self.position = position
        self.remaining: Iterator[tuple[int, Any]] = enumerate(parts)
        # Two lists and not pairs, which take longer to make: most trees have many leaves.
        self.leaf_positions: list[int] = []
        self.leaf_numbers: list[int] = []
        self.nodes_at: list[tuple[int, int]] = []
        self.keeper: tuple[InPlaceRule, Any] | None
        """The object around this node, or the node itself, that is changed in place."""
        if isinstance(rule, InPlaceRule):
            self.keeper = (rule, container)
        else:
            self.keeper = parent.keeper if parent else None

    def take_arrays(
        self, leaves: Leaves, numbers: dict[int, int], is_array: Callable[[Any], bool]
    ) -> None:
        """Take all parts at once if they are new arrays of one type; faster than one by one."""
        parts, first = self.parts, len(leaves)
        kinds = set(map(type, parts))
        if len(kinds) > 1 or rule_of(kinds.pop()).certain or not all(map(is_array, parts)):
            return
        identities = dict(zip(map(id, parts), range(first, first + len(parts)), strict=True))
        if len(identities) < len(parts) or not numbers.keys().isdisjoint(identities):
            return
        numbers.update(identities)
        leaves.add_all(self)
        self.leaf_positions.extend(range(len(parts)))
        self.leaf_numbers.extend(identities.values())
        self.remaining = iter(())

    def with_leaves(self, new: list[Any]) -> list[Any]:
        parts = self.parts.copy()
        for position, number in zip(self.leaf_positions, self.leaf_numbers, strict=True):
            parts[position] = new[number]
        return parts

    def with_nodes(self, parts: list[Any], built: list[Any]) -> list[Any]:
        for position, number in self.nodes_at:
            parts[position] = built[number]
        return parts

    def made_from(self, parts: list[Any]) -> Any:
        if self.keeper is None:
            return self.rule.rebuild(self.container, self.keys, parts)
        if all(map(is_, parts, self.parts)):
            return self.container
        return self.rule.refill(self.container, self.keys, parts)

    @property
    def path(self) -> str:
        return self.parent.path_to(self.position) if self.parent else ""

    def path_to(self, position: int) -> str:
        steps: list[str] = []
        node: _Node | None = self
        while node is not None:
            steps.append(node.rule.step(node.keys[position]))
            position = node.position
            node = node.parent
        return "".join(reversed(steps)).removeprefix(".")


class _RootRule(Rule):
    """The rule of a container around the tree, which has no path."""

    def step(self, key: Any) -> str:
        return ""


_ROOT = _RootRule()


def _take_apart(rule: Rule, container: Any, node: _Node, position: int) -> Parts | None:
    try:
        return rule.take_apart(container)
    except ConfigurationError as error:
        path = node.path_to(position)
        raise TransferError(f"{path or 'the tree'}: {error}", path) from error
    except (AnyDeviceError, MemoryError):
        raise
    except Exception as error:
        path = node.path_to(position)
        raise _failure("taken apart", container, path, error) from error


def _cycle(value: Any, node: _Node, position: int) -> TransferError:
    path = node.path_to(position)
    around = node
    while around.container is not value and around.parent is not None:
        around = around.parent
    name = type(value).__name__
    where = f"at {around.path}" if around.path else "at the root"
    return TransferError(
        f"{path}: the tree contains itself here ({name} {where}); remove this reference, or "
        f"register the class with register_type",
        path,
    )


def _failure(what: str, container: Any, path: str, error: Exception) -> TransferError:
    kind = type(container)
    return TransferError(
        f"{path or 'the tree'}: a {kind_name(kind)} could not be {what}: "
        f"{type(error).__name__}: {error}; say how with register_type({kind.__name__}, …)",
        path,
    )
