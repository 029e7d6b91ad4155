"""How fast a decoding step is on CUDA: its kernels checked, their tiles tuned, a graph replayed.

    PYTHONPATH=src python bench/gpu_decode.py [check] [tune] [speed] [--seconds 60] [--batches 1,8]

Needs an NVIDIA card of the size of an H200; all parts run unless some are named. `check` compares
the kernels with the float64 reference and a few layers of the 7B shape with ops in float32. `tune`
climbs from the tiles of the code to faster ones, one number of one tile at a time, for `--seconds`
a batch size, and prints a table to put there; `speed` uses what it found. `speed` replays a whole
step, from token to token, with the likeliest token chosen, and says how near to the limit of the
memory that is; beside it the same step in ops. Weights are random, of the shape of Mistral 7B.

`--tiny` runs all of it at a toy size; with TRITON_INTERPRET=1 and without a card as well.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from anydevice._check import checks as trials
from anydevice._check.cases.decoding import DECODER_LAYER
from anydevice._core.device import Device
from anydevice._core.engine import LayerConfig
from anydevice._core.record import replace
from anydevice._engines.torch.captured import CapturedStep
from anydevice._engines.torch.triton import decode_attention, decode_products, fused
from anydevice._engines.torch.triton.decoder_layer import LayerWeights, decoder_layer
from anydevice._llm import decoder
from anydevice._llm.description import Description, LayerDescription, Rope
from anydevice._machine.engines import registry

PLACE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if PLACE == "cuda" else torch.float16
BARS = {(1, 512): 272.0, (1, 4096): 248.0, (8, 1024): 1800.0, (32, 1024): 5500.0}
"""Tokens a second by batch and context."""
STEPS, TURNS = 48, 5
TUNED_LAYERS = 8
Row = tuple[str, str, bool]
Tiles = dict[Any, Any]


class Shape(NamedTuple):
    """The sizes of a decoder."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    vocabulary: int = 32768
    layers: int = 32

    @property
    def numbers(self) -> LayerConfig:
        return LayerConfig(
            self.heads, self.kv_heads, self.size, 1e-5, self.size**-0.5, rotated=self.size
        )

    @property
    def description(self) -> Description:
        layer = LayerDescription(rope=Rope(theta=10000.0, size=self.size))
        return Description(
            vocabulary=self.vocabulary,
            hidden=self.hidden,
            intermediate=self.intermediate,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.size,
            value_size=self.size,
            eps=1e-5,
            layers=(layer,) * self.layers,
            scale=self.size**-0.5,
        )


TINY = Shape(64, 96, 4, 2, 16, 100, 2)


class Model:
    """Random weights, a cache for a batch, and a step over them."""

    def __init__(self, shape: Shape, batch: int, slots: int, weights: Any = None) -> None:
        self.shape, self.batch, self.slots = shape, batch, slots
        self.weights = weights or random_weights(shape)
        self.cache = [
            {name: normal(batch, shape.kv_heads, slots, shape.size) for name in ("keys", "values")}
            for _ in range(shape.layers)
        ]
        self.tiles: Tiles = dict(decode_products.TILES)
        self.attention: Any = None
        steps = fused._frequencies(shape.size, 10000.0, (), torch.device(place()))
        self.rotation = decode_attention.Rotation(*steps)

    def state(self, position: int) -> dict[str, torch.Tensor]:
        like = {"dtype": torch.int32, "device": PLACE}
        return {
            "token": torch.full((self.batch,), 17 % self.shape.vocabulary, **like),
            "position": torch.full((self.batch,), position, **like),
        }

    def fused(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The step through the kernels."""
        weights, position = self.weights, state["position"]
        x = weights["embedding"][state["token"]][:, None]
        for layer, kept in zip(weights["layers"], self.cache, strict=True):
            x = self.layer(x, position, layer, kept)
        logits = decode_products.product(
            "head", x[:, 0], weights["head"]["weight"], norm=weights["norm"]["weight"], eps=1e-5,
            tiles=self.tiles,
        )  # fmt: skip
        return {"token": logits.argmax(-1).to(torch.int32), "position": position + 1}

    def layer(self, x: Any, position: Any, layer: Any, kept: Any) -> Any:
        names = ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down")
        weights = LayerWeights(*(layer[name]["weight"] for name in names))
        return decoder_layer(
            x,
            position,
            kept["keys"],
            kept["values"],
            weights,
            self.shape.numbers,
            self.rotation,
            self.tiles,
            self.attention,
        )

    def in_ops(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same step in ops, by the kernels that are trusted and the library's functions."""
        ones = torch.ones_like(state["position"])
        hidden, _ = decoder.forward(
            self.shape.description, self.weights, state["token"][:, None], state["position"], ones,
            self.cache, last=True,
        )  # fmt: skip
        logits = decoder.logits(self.shape.description, self.weights, hidden)
        return {"token": logits.argmax(-1).to(torch.int32), "position": state["position"] + 1}

    def bytes(self, context: int) -> int:
        """What a step must read: all weights but the embedding, and the keys and values."""
        weights = sum(
            part["weight"].nbytes for layer in self.weights["layers"] for part in layer.values()
        )
        kept = 2 * self.shape.layers * self.shape.kv_heads * self.shape.size * HALF.itemsize
        return int(weights + self.weights["head"]["weight"].nbytes + kept * self.batch * context)


def place() -> str:
    return "cuda:0" if PLACE == "cuda" else "cpu"


def normal(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=HALF, device=PLACE).normal_(0, spread)


def random_weights(shape: Shape) -> Any:
    queries, keys = shape.heads * shape.size, shape.kv_heads * shape.size

    def matrix(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        return {"weight": normal(outputs, inputs, spread=inputs**-0.5)}

    def norm() -> dict[str, torch.Tensor]:
        return {"weight": normal(shape.hidden, spread=0.1) + 1}

    def layer() -> Any:
        return {
            "attention_norm": norm(),
            "qkv": matrix(queries + 2 * keys, shape.hidden),
            "output": matrix(shape.hidden, queries),
            "mlp_norm": norm(),
            "gate_up": matrix(2 * shape.intermediate, shape.hidden),
            "down": matrix(shape.hidden, shape.intermediate),
        }

    return {
        "embedding": normal(shape.vocabulary, shape.hidden),
        "layers": [layer() for _ in range(shape.layers)],
        "norm": norm(),
        "head": matrix(shape.vocabulary, shape.hidden),
    }


# Are they right?


def check(shape: Shape, dtypes: Sequence[str]) -> Iterator[Row]:
    """The rows of the check that decides about trust, and layers of the real shape."""
    engine, device = registry.load("torch"), Device(place() if PLACE == "cuda" else "cpu")
    row = replace(DECODER_LAYER, function=fused.UNTRUSTED_KERNELS["decoder_layer"])
    for dtype in dtypes:
        for case in row.cases:
            wrong = trials.run(trials.prepare(row, case, dtype), engine, device)
            yield f"{dtype}, {case.name}", "right" if wrong is None else str(wrong), wrong is None
    few = shape._replace(layers=2)
    for batch in (1, 3, 8, 32):
        yield of_the_shape(few, batch)


def of_the_shape(shape: Shape, batch: int) -> Row:
    """Two layers against ops in float32, at positions of all kinds."""
    slots = 700 if shape.hidden > 1000 else 40
    model = Model(shape, batch, slots)
    wide = mapped(model.weights, torch.Tensor.float)
    held = mapped(model.cache, torch.Tensor.float)
    position = torch.arange(batch, device=PLACE, dtype=torch.int32) * 19 % (slots - 2) + 1
    x = normal(batch, 1, shape.hidden)
    expected, ones = x.float(), torch.ones_like(position)
    for number, kind in enumerate(shape.description.layers):
        own, others = model.weights["layers"][number], wide["layers"][number]
        x = model.layer(x, position, own, model.cache[number])
        expected, _ = decoder.run_layer(
            shape.description, kind, others, expected, position, ones, held[number]
        )
    off = ((x.float() - expected).norm() / expected.norm()).item()
    bar = 2e-2 if torch.bfloat16 == HALF else 4e-3
    return f"two layers, batch {batch}", f"off by {off:.1e} (bar {bar:g})", off < bar


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        return {name: mapped(part, change) for name, part in tree.items()}
    return [mapped(part, change) for part in tree] if isinstance(tree, list) else change(tree)


# How fast


def rate(model: Model, step: Callable[..., Any], position: int, steps: int, turns: int) -> float:
    """The median tokens a second of all rows, over several turns of so many steps."""
    with torch.inference_mode():
        captured = CapturedStep(step, model.state(position), ["token"])
        found = []
        for _ in range(turns):
            captured.load(model.state(position))
            finish()
            began = time.perf_counter()
            for _ in range(steps):
                if captured._graph is not None:
                    captured._graph.replay()
                else:
                    captured()
            finish()
            found.append(steps * model.batch / (time.perf_counter() - began))
    return statistics.median(found)


def finish() -> None:
    if PLACE == "cuda":
        torch.cuda.synchronize()


def speed(shape: Shape, batches: list[int], contexts: list[int], found: Tiles) -> Iterator[Row]:
    limit = bandwidth()
    yield "memory", f"read at {limit / 1e12:.2f} TB/s", True
    weights = random_weights(shape)
    steps = STEPS if PLACE == "cuda" else 2
    for batch in batches:
        for context in contexts:
            model = Model(shape, batch, -(-(context + steps + 8) // 64) * 64, weights)
            model.tiles, model.attention = tiles_of(found, batch)
            ours = rate(model, model.fused, context, steps, TURNS)
            if batch > 1 or context > 512:
                theirs = ""
            else:
                theirs = f", in ops {rate(model, model.in_ops, context, steps, TURNS):.0f}"
            most = limit / model.bytes(context) * batch
            bar = BARS.get((batch, context), 0.0) if shape.hidden > 1000 else 0.0
            said = f"{ours:.1f} tok/s, {ours / most:.2f} of {most:.0f}{theirs}"
            label = f"batch {batch}, context {context}"
            yield label, f"{said} (bar {bar:g})" if bar else said, ours >= bar
            del model


def bandwidth() -> float:
    """The bytes a second at which memory is read."""
    if PLACE != "cuda":
        return 1e10
    x = torch.empty(2**31, dtype=torch.int8, device=PLACE).random_()
    wide = x.view(torch.int64)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            wide.max()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 4e3)
    return float(x.numel() / min(times))


# Which tiles


PRODUCT_OPTIONS: dict[str, tuple[Any, ...]] = {
    "outputs": (1, 2, 4, 8, 16, 32, 64, 128),
    "inputs": (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "warps": (2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 5, 6),
    "splits": (1, 2, 4, 8),
    "inside": (True, False),
    "ahead": (False, True),
    "release": ("first", "waited", "last"),
}
ATTENTION_OPTIONS: dict[str, tuple[Any, ...]] = {
    "parts": (4, 8, 16, 32, 64, 128),
    "keys": (16, 32, 64, 128, 256),
    "warps": (2, 4, 8, 16),
    "stages": (1, 2, 3, 4),
    "per_processor": (1, 2, 4, 8),
    "release": ("first", "waited", "last"),
}
KINDS = ("gate_up", "down", "qkv", "output", "attention", "head")
"""In the order of their share of a step."""


def neighbours(tile: Any, options: Mapping[str, tuple[Any, ...]], rows: int) -> Iterator[Any]:
    """The tiles that differ in one number, by one step, or in one choice."""
    for name, values in options.items():
        if rows == 1 and name in ("splits", "inside"):
            continue
        at = values.index(getattr(tile, name))
        near = [values[each] for each in (at + 1, at - 1) if 0 <= each < len(values)]
        for value in near if isinstance(values[0], int) and len(values) > 2 else values:
            if value != getattr(tile, name):
                changed = replace(tile, **{name: value})
                if rows == 1 or name == "release" or getattr(changed, "outputs", 16) >= 16:
                    yield changed


def tiles_of(found: Tiles, batch: int) -> tuple[Tiles, Any]:
    """The tiles of all products, and of attention, with those that were found for a batch."""
    rows = decode_products.padded_rows(batch)
    tiles = {**decode_products.TILES}
    tiles |= {key: tile for key, tile in found.items() if key[0] != "attention"}
    return tiles, found.get(("attention", rows))


class Climb:
    """A search for faster tiles of one batch size, from those in `found`."""

    def __init__(self, shape: Shape, batch: int, context: int, found: Tiles) -> None:
        self.few = shape._replace(layers=min(shape.layers, TUNED_LAYERS))
        self.steps = 24 if PLACE == "cuda" else 1
        slots = -(-(context + self.steps + 8) // 64) * 64
        self.model, self.context, self.found = Model(self.few, batch, slots), context, found
        self.rows = decode_products.padded_rows(batch)
        self.compiled: dict[Any, Future[str]] = {}

    def usual(self, kind: str) -> Any:
        """The tile of the code."""
        if kind == "attention":
            return decode_attention.usual_tile(self.few.size, self.model.batch)
        return decode_products.TILES[kind, self.rows]

    def here(self, kind: str) -> Any:
        return self.found.get((kind, self.rows), self.usual(kind))

    def others(self, kind: str) -> list[Any]:
        options = ATTENTION_OPTIONS if kind == "attention" else PRODUCT_OPTIONS
        return list(neighbours(self.here(kind), options, self.rows))

    def compile_ahead(self, pool: Executor | None, kinds: Sequence[str]) -> None:
        """Have all neighbours compiled, many at once, into Triton's folder of compiled code."""
        if pool is None:
            return
        tiles = [(kind, tile) for kind in kinds for tile in self.others(kind)]
        for kind, tile in tiles:
            if (kind, tile) not in self.compiled:
                tried = {**self.found, (kind, self.rows): tile}
                asked = self.few._replace(layers=1), self.model.batch, self.context, tried
                self.compiled[kind, tile] = pool.submit(compiled, *asked)

    def measured(self) -> float:
        self.model.tiles, self.model.attention = tiles_of(self.found, self.model.batch)
        try:
            return rate(self.model, self.model.fused, self.context, self.steps, 3)
        except Exception as error:  # too much shared memory, or a tile that does not compile
            print(f"    {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
            return 0.0

    def run(self, ends: float, pool: Executor | None, kinds: Sequence[str] = ()) -> Row:
        first = best = self.measured()
        improved, tried = True, 0
        while improved and time.monotonic() < ends:
            improved = False
            self.compile_ahead(pool, kinds or KINDS)
            for kind in kinds or KINDS:
                here = self.here(kind)
                for tile in self.others(kind):
                    done = self.compiled.get((kind, tile))
                    if time.monotonic() > ends or (done and done.result()):
                        continue
                    self.found[kind, self.rows] = tile
                    now, tried = self.measured(), tried + 1
                    if now > best * 1.002:
                        best, here, improved = now, tile, True
                        print(f"  {kind} {self.rows}: {tile} {now:.1f}", flush=True)
                self.found[kind, self.rows] = here
                if here == self.usual(kind):
                    del self.found[kind, self.rows]
        said = f"{first:.0f} → {best:.0f} tok/s with {self.few.layers} layers, {tried} tiles tried"
        said += ", out of time" if improved else ", no neighbour is faster"
        return f"tuned batch {self.model.batch}, context {self.context}", said, best > 0


def compiled(shape: Shape, batch: int, context: int, found: Tiles) -> str:
    """Compile what a step needs, in a process of its own; what is wrong, if anything is."""
    model = small_model(shape._replace(vocabulary=min(shape.vocabulary, 2048)), batch, context)
    model.tiles, model.attention = tiles_of(found, batch)
    try:
        with torch.inference_mode():
            model.fused(model.state(context))
        finish()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@cache
def small_model(shape: Shape, batch: int, context: int) -> Model:
    return Model(shape, batch, -(-(context + 32) // 64) * 64)


def workers() -> Any:
    """Processes that compile, where there are cores for them."""
    cores = os.cpu_count() or 1
    if PLACE != "cuda" or cores < 4:
        return nullcontext()
    return ProcessPoolExecutor(cores - 2, multiprocessing.get_context("spawn"))


def tune(
    shape: Shape, batches: list[int], contexts: list[int], seconds: float, found: Tiles
) -> Iterator[Row]:
    """Climb for so long for each batch size, and put what is faster into `found`."""
    with workers() as pool:
        for batch in batches:
            context = contexts[0] if batch == 1 else contexts[-2]
            climb = Climb(shape, batch, context, found)
            yield climb.run(time.monotonic() + seconds, pool)
            del climb
        if 1 in batches:  # attention alone, where most keys are: not put into `found`
            long = Climb(shape, 1, contexts[-1], dict(found))
            yield long.run(time.monotonic() + seconds / 4, pool, ["attention"])
            print(f"  {long.here('attention')}", flush=True)


def table(found: Tiles) -> str:
    lines = [f"    {key}: {tile}," for key, tile in sorted(found.items(), key=str)]
    return "\n".join(["Tiles that are faster than those of the code:", *lines])


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="check, tune, speed")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tuning for a batch size")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="512,1024,4096")
    usual = "bfloat16,float16" if PLACE == "cuda" else "float16"
    parser.add_argument("--dtypes", default=usual, help="that are checked")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the program")
    asked = parser.parse_args()
    shape = TINY if asked.tiny else Shape(layers=asked.layers)
    batches = [int(each) for each in asked.batches.split(",")]
    contexts = [int(each) for each in asked.contexts.split(",")]
    torch.manual_seed(0)
    rows: list[Row] = []
    found: Tiles = {}

    def tell(row: Row) -> None:
        rows.append(row)
        print(f"{'✓' if row[2] else '✗'} {row[0]:<44} {row[1]}", flush=True)

    began = time.perf_counter()
    parts = asked.parts or ["check", "tune", "speed"]
    if "check" in parts:
        for row in check(shape, asked.dtypes.split(",")):
            tell(row)
    if "tune" in parts:
        for row in tune(shape, batches, contexts, asked.seconds, found):
            tell(row)
        print(table(found), flush=True)
    if "speed" in parts:
        for row in speed(shape, batches, contexts, found):
            tell(row)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return rows


if __name__ == "__main__":
    sys.exit(0 if all(right for *_, right in main()) else 1)
