"""The shape of an encoder or encoder–decoder, from its config and the row of its family."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from anydevice._core.dtypes import as_dtype
from anydevice._core.record import Record, replace
from anydevice._plan.config import ModelConfig
from anydevice._plan.encoder_families import Layers, ModelPart, Size
from anydevice._plan.families import (
    MOST_LAYERS,
    NO_DTYPE,
    USUAL_DTYPE,
    Flag,
    ModelShape,
    Tower,
    integer,
    quotient,
    rounding,
)


class Sizes:
    """The numbers of one config, by the names that the row of its family uses."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.encoder is not None
        self.config, self.row = config, config.encoder
        members = self.row.members.items()
        self.members = {key: Sizes(config.member(key, family)) for key, family in members}
        config.check_options(self.row.only)
        config.check_options({key: self.get(other) for key, other in self.row.same.items()})

    def get(self, key: str) -> Any:
        """Return the value of a key, of a derived name, or, behind a dot, of a member's key."""
        member, _, inner = key.rpartition(".")
        if member:
            return self.members[member].get(inner)
        if key in self.row.derived:
            return self.row.derived[key](self)
        if key == "labels":
            return self.config.labels
        value = self.config.get(key)
        other = self.row.otherwise.get(key)
        return self.get(other) if value is None and other else value

    def size(self, size: Size) -> int:
        """Return a sum of products of numbers and keys; raise if a key has no integer."""
        if isinstance(size, int):
            return size
        return sum(prod(map(self._factor, term.split("*"))) for term in size.split("+"))

    def _factor(self, word: str) -> int:
        if word.lstrip("-").isdigit():
            return int(word)
        return integer(f"{self.config.source}: {word}", self.get(word), least=0)

    def flag(self, flag: Flag) -> bool:
        """Return the value of a flag of the row; `"!"` before a key turns it around."""
        if isinstance(flag, bool):
            return flag
        return not self.get(flag[1:]) if flag.startswith("!") else bool(self.get(flag))


Placed = tuple[Sizes, ModelPart]
"""A part, and the sizes of the model that it belongs to."""


class Count(Record):
    """Parameters, the bytes of all weights and buffers, and those of each matrix."""

    parameters: int
    bytes: int
    matrices: tuple[int, ...]


def encoder_shape(config: ModelConfig, dtype: str | None = None) -> ModelShape:
    """Return the shape of the encoder or encoder–decoder that a config describes.

    Raises `ConfigurationError` for a wrong number, and for a class or an option not in the row.
    """
    sizes = Sizes(config)
    if config.get("quantization_config"):
        raise config.refusal(f"quantized weights of {config.family} are not counted")
    kind = config.model_class or sizes.row.usual
    head = sizes.row.classes.get(kind)
    if head is None:
        raise config.refusal(f"the class {kind!r} of {config.family} is not in the table")
    named = dtype or config.dtype
    width = as_dtype(named or USUAL_DTYPE).itemsize
    rows = [(own, row) for own in (sizes, *sizes.members.values()) for row in own.row.towers]
    rows = [rows[number] for number in head.towers] if head.towers is not None else rows
    towers = tuple(_tower(own, row) for own, row in rows)
    layers = [each for own, row in rows for each in _layers(own, row, width)]
    before = _count(
        [(sizes, part) for part in sizes.row.before]
        + [(own, part) for own, row in rows for part in row.before],
        width,
    )
    after = _count(((own, part) for own, row in rows for part in row.after), width)
    top = _count(((sizes, part) for part in head.parts), width)
    outputs = sizes.size(head.outputs)
    writes = head.outputs_of == "new token"
    vocabulary = outputs if head.outputs == "vocab_size" else 0
    crossed = tuple(
        2 * tower.heads * tower.head_size * (tower.source is not None)
        for tower in towers
        for _ in range(tower.layers)
    )
    last = vars(towers[-1])
    counts = (*layers, before, after, top)
    return ModelShape(
        **{key: last[key] for key in ModelShape._fields if key in last}
        | {
            "layers": len(layers),
            "kv_elements": crossed if writes else (0,) * len(layers),
            "windows": (None,) * len(layers),
        },
        name=str(config.raw.get("_name_or_path") or config.family),
        architecture=config.family,
        dtype=named or USUAL_DTYPE,
        vocabulary=vocabulary,
        tied_embeddings=bool(vocabulary) and top.parameters < vocabulary * towers[-1].hidden,
        layer_weights=tuple(each.parameters for each in layers),
        layer_bytes=tuple(each.bytes for each in layers),
        embedding_parameters=before.parameters,
        embedding_bytes=before.bytes,
        head_parameters=top.parameters,
        head_bytes=top.bytes,
        other_parameters=after.parameters,
        other_bytes=after.bytes,
        outputs=outputs,
        outputs_of=head.outputs_of,
        towers=towers,
        cross_elements=crossed if writes else (),
        source_tokens=towers[0].tokens,
        longest_context=sizes.size(sizes.row.longest) or None,
        rounding=rounding(size for each in counts for size in each.matrices),
        exact=True,
        assumed=() if named else (NO_DTYPE,),
    )


def _tower(sizes: Sizes, row: Layers) -> Tower:
    hidden, heads, layers = map(sizes.size, (row.hidden, row.heads, row.layers))
    integer(f"{sizes.config.source}: {row.layers}", layers, 1, MOST_LAYERS)
    source = sizes.config.source
    even = sizes.size(row.head_size) or quotient(f"{source}: {row.hidden}", hidden, "heads", heads)
    return Tower(
        layers=layers,
        hidden=hidden,
        intermediate=sizes.size(row.intermediate),
        heads=heads,
        kv_heads=heads,
        head_size=even,
        kv_elements=(),
        windows=(None,),
        build=replace(row.build, gated=row.build.gated or sizes.flag(row.gated)),
        activation=str(sizes.get(row.activation) or ""),
        tokens=sizes.size(row.tokens) or None,
        source=row.source,
        distances=sizes.size(row.distances) if sizes.get("relative_attention") else 0,
    )


def _layers(sizes: Sizes, row: Layers, width: int) -> list[Count]:
    """Return the count of each layer of a tower, in order."""
    first, later = (
        _count(((sizes, part) for part in (*row.layer, *more)), width)
        for more in (row.first, row.later)
    )
    return [first, *[later] * (sizes.size(row.layers) - 1)]


def _count(parts: Iterable[Placed], width: int) -> Count:
    parameters = total = 0
    matrices: list[int] = []
    for sizes, part in parts:
        if part.when and not sizes.flag(part.when):
            continue
        rows, columns, count = map(sizes.size, (part.rows, part.columns, part.count))
        elements, element = count * rows * (columns + sizes.flag(part.bias)), part.width or width
        parameters += elements * part.learned
        total += elements * element
        matrices += [rows * columns * element] * (count if columns > 1 else 0)
    return Count(parameters, total, tuple(matrices))
