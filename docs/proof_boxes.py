"""Draws how a proof divides the inputs of a network with two of them, for `make pictures`.

The colour is the output of the network. Each rectangle is a part in which plain bounds prove that
the output stays below the limit: they are small where it comes close to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import anydevice
from anydevice import nn, proofs
from anydevice._proofs.checking.certificate import LEAF

SIZE, DOTS, SHADES, LEGEND = 420, 42, 12, 46
REGION = proofs.box([-1.0, -1.0], [1.0, 1.0])
MARGIN = 0.004
"""How far the limit is above the largest output that was seen, as a share of the range."""

SEED = 1

Box = tuple[float, float, float, float]


def network() -> nn.Model:
    """A network whose weights are larger than usual, so that its output has hills."""
    cpu = anydevice.device("cpu", engine="numpy")
    layers: Any = nn.Dense(2, 32, initializer=nn.Normal(2.5)), "relu", nn.Dense(32, 24), "relu"
    return nn.build(*layers, nn.Dense(24, 1), seed=SEED, device=cpu)


def outputs(model: nn.Model) -> Any:
    """The outputs over a grid, from the lower left."""
    along = (np.arange(DOTS) + 0.5) / DOTS * 2 - 1
    grid = np.stack(np.meshgrid(along, along), -1).reshape(-1, 2).astype(np.float32)
    return np.asarray(model(grid)).reshape(DOTS, DOTS)


def parts(steps: Any) -> Iterator[Box]:
    """The parts of a tree that only halves inputs: left, right, bottom, top."""
    stack: list[Box] = [(-1.0, 1.0, -1.0, 1.0)]
    for step in steps:
        left, right, bottom, top = stack.pop()
        if step == LEAF:
            yield left, right, bottom, top
        elif step == 0:
            middle = (left + right) / 2
            stack += [(middle, right, bottom, top), (left, middle, bottom, top)]
        elif step == 1:
            middle = (bottom + top) / 2
            stack += [(left, right, middle, top), (left, right, bottom, middle)]
        else:
            raise SystemExit("this proof has cases of neurons, which are no rectangles")


def stretches(there: Any) -> Iterator[tuple[int, int, int]]:
    """The cells of a grid, those beside each other as one: row, first column, and how many."""
    for row, cells in enumerate(there):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], cells, [0]))))
        for start, end in edges.reshape(-1, 2).tolist():
            yield row, start, end - start


def drawn(values: Any, boxes: list[Box], limit: float) -> str:
    """The picture as SVG."""
    low, high = float(values.min()), limit
    step = SIZE / DOTS

    def place(x: float) -> float:
        return round((x + 1) / 2 * SIZE, 2)

    shares = (values - low) / (high - low)
    levels = np.clip((shares * SHADES).astype(int), 0, SHADES - 1)
    cells = []
    for level in range(SHADES):
        share = (level + 0.5) / SHADES
        colour = f"rgb({238 - 200 * share:.0f},{243 - 120 * share:.0f},{250 - 40 * share:.0f})"
        squares = "".join(
            f"M{start * step:g} {SIZE - (row + 1) * step:g}h{count * step:g}v{step:g}"
            f"h{-count * step:g}z"
            for row, start, count in stretches(levels == level)
        )
        cells.append(f'<path fill="{colour}" stroke="{colour}" stroke-width="0.4" d="{squares}"/>')
    frames = [
        f'<rect x="{place(left)}" y="{SIZE - place(top)}" width="{place(right) - place(left):g}" '
        f'height="{place(top) - place(bottom):g}"/>'
        for left, right, bottom, top in boxes
    ]
    said = f"output from {low:.2f} (light) to {values.max():.2f} (dark); proved: below {limit:.2f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE + LEGEND}" '
            f'width="{SIZE}" '
            f'role="img" aria-label="{len(boxes)} rectangles over a square of inputs, small where '
            'the output is close to the limit">',
            f'<rect width="{SIZE}" height="{SIZE + LEGEND}" fill="#fff"/>',
            *cells,
            '<g fill="none" stroke="#c2410c" stroke-width="0.8">',
            *frames,
            "</g>",
            f'<g font-family="system-ui,sans-serif" font-size="13" fill="#222"><text x="6" '
            f'y="{SIZE + 18}">{said}</text><text x="6" y="{SIZE + 36}">{len(boxes)} parts, each '
            "decided by bounds alone</text></g>",
            "</svg>",
            "",
        ]
    )


def picture() -> str:
    """The proof, searched for and drawn."""
    model = network()
    values = outputs(model)
    limit = float(values.max() + MARGIN * (values.max() - values.min()))
    result = proofs.prove(model, proofs.within(-np.inf, limit), over=REGION, limit=120)
    if not isinstance(result, proofs.Proof):
        raise SystemExit(f"nothing to draw: {result}")
    result.check()
    boxes = list(parts(result.certificates[0].trees[0].steps.tolist()))
    return drawn(values, boxes, limit)
