"""Draws docs/architecture.svg from the imports of src/anydevice: `python docs/draw_layers.py`.

The rooms stand in the order of `.importlinter`. A dot in a row is a room that the row's room imports:
every dot lies right of the diagonal, as the contract of the layers demands, except `errors`, which
prints its messages with `_core.text`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/anydevice"
PICTURE = ROOT / "docs/architecture.svg"
CELL, LEFT, TOP = 22, 112, 92
STYLE = """
:root { --ink: #1d2329; --soft: #5c6873; --paper: #ffffff; --line: #d8dee4; --mark: #0b62c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa7b3; --paper: #14181c; --line: #39434d; --mark: #6db1ff; } }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); } .line { stroke: var(--line); } .mark { fill: var(--mark); }
.paper { fill: var(--paper); } .own { fill: var(--line); }
"""


def rooms() -> list[str]:
    """Return the rooms from the top layer to the bottom one."""
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter", encoding="utf-8")
    layers = contracts["importlinter:contract:layers"]["layers"]
    return layers.replace("|", " ").replace(":", " ").split()


def imports(room: str) -> set[str]:
    """Return the rooms that the modules of a room import, types aside."""
    paths = [SOURCE / f"{room}.py", *(SOURCE / room).rglob("*.py")]
    trees = [ast.parse(path.read_text("utf-8")) for path in paths if path.exists()]
    return {name for tree in trees for name in _imported(tree)} - {room}


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the rooms that a part of a module imports when it runs."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.ImportFrom) and node.module == "anydevice":
        yield from (alias.name for alias in node.names if (SOURCE / alias.name).exists())
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anydevice."):
        yield (node.module or "").split(".")[1]
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def picture() -> str:
    """Return the drawing: a row and a column for each room, and a dot for each import."""
    names = rooms()
    size = CELL * len(names)
    parts = [f'<rect class="paper" width="{LEFT + size + 20}" height="{TOP + size + 14}" rx="8"/>']
    for number, name in enumerate(names):
        middle = CELL * (number + 0.5)
        x, y = LEFT + middle, TOP + middle
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{name}</text>',
            f'<text class="soft" transform="translate({x + 4} {TOP - 8}) rotate(-60)">{name}</text>',
            f'<path class="line" d="M{LEFT} {y}H{LEFT + size}M{x} {TOP}V{TOP + size}"/>',
            f'<rect class="own" x="{x - 5}" y="{y - 5}" width="10" height="10" rx="2"/>',
        ]
    for row, name in enumerate(names):
        for column in sorted(names.index(other) for other in imports(name) & set(names)):
            x, y = LEFT + CELL * (column + 0.5), TOP + CELL * (row + 0.5)
            title = f"{name} imports {names[column]}"
            parts.append(
                f'<circle class="mark" cx="{x}" cy="{y}" r="5"><title>{title}</title></circle>'
            )
    width, height = LEFT + size + 20, TOP + size + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'role="img" aria-label="Which room of anydevice imports which">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
