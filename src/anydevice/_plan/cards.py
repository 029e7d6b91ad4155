"""Cards that need not be here, and clusters of them in words: "16xH100-80GB"."""

from __future__ import annotations

import re
from typing import Literal

from anydevice._core.record import Record, replace
from anydevice._core.text import parse_size, shortened
from anydevice.errors import ConfigurationError

GIB = 2**30
NODE = 8
"""The cards of a node by default."""

EXAMPLES = "'16xH100-80GB', '2xH100', '4x8xA100-40GB' (4 nodes of 8), or '8xMyCard-48GB'"

Generation = Literal["a100", "h100", ""]
"""The generation whose measured efficiencies apply to a card; "" plans memory and no speed."""


class Card(Record):
    """A card: its memory in bytes as programs find it, and its maker's rates by the second.

    `flops` are those of dense products in 16 bits, `bandwidth` the bytes of its own memory, `link`
    the bytes to other cards of its node, and `network` the bytes from a node of such cards to other
    nodes. `measured` says that published runs on this card were compared with; `like` is the
    generation whose efficiencies it is planned with. `backend` is the backend of its devices.
    """

    name: str
    memory: int
    flops: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    network: float = 0.0
    like: Generation = ""
    measured: bool = False
    backend: str = "cuda"


_ROWS: tuple[tuple[str, float, float, float, float, float, Generation], ...] = (
    ("H100-80GB", 79.1, 989, 3350, 450, 400, "h100"),
    ("H100-96GB", 94.9, 989, 2400, 450, 400, "h100"),
    ("H200-141GB", 139.8, 989, 4800, 450, 400, "h100"),
    ("B200-180GB", 178.3, 2250, 7700, 900, 400, "h100"),
    ("A100-80GB", 79.1, 312, 2039, 300, 200, "a100"),
    ("A100-40GB", 39.4, 312, 1555, 300, 200, "a100"),
    ("V100-32GB", 31.7, 125, 900, 150, 12.5, "a100"),
    ("V100-16GB", 15.8, 125, 900, 150, 12.5, "a100"),
    ("L40S-48GB", 44.4, 362, 864, 32, 50, "a100"),
    ("RTX4090-24GB", 23.6, 165, 1008, 32, 12.5, "a100"),
    ("MI300X-192GB", 191.0, 1307, 5300, 448, 400, "h100"),
)
"""Name, GiB, TFLOP/s, GB/s of memory, link and network, and the generation."""
_MEASURED = ("H100-80GB", "A100-80GB", "A100-40GB")

CARDS = {
    name.upper(): Card(
        name,
        memory=int(memory * GIB),
        flops=teraflops * 1e12,
        bandwidth=bandwidth * 1e9,
        link=link * 1e9,
        network=network * 1e9,
        like=like,
        measured=name in _MEASURED,
        backend="rocm" if name.startswith("MI") else "cuda",
    )
    for name, memory, teraflops, bandwidth, link, network, like in _ROWS
}
"""The known cards; of several with one name, the first is meant where no memory is given."""


class Cluster(Record):
    """Nodes of equal cards."""

    card: Card
    nodes: int = 1
    per_node: int = 1

    @property
    def cards(self) -> int:
        """All cards."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        regular = self.nodes == 1 or self.per_node == NODE
        count = str(self.cards) if regular else f"{self.nodes}x{self.per_node}"
        return f"{count}x{self.card.name}"

    def of(self, cards: int) -> Cluster:
        """Return `cards` such cards in equal nodes; a single node grows to the usual size.

        >>> str(cluster_of("2xH100").of(32))
        '32xH100-80GB'
        """
        size = max(self.per_node, NODE) if self.nodes == 1 else self.per_node
        if cards <= size:
            return replace(self, nodes=1, per_node=cards)
        return replace(self, nodes=-(-cards // size), per_node=size)


_WORDS = re.compile(
    r"(?:(?:(?P<nodes>\d+)\s*[x×*]\s*)?(?P<count>\d+)\s*[x×*]\s*)?"
    r"(?P<name>[a-z][a-z0-9_.+ ]*?)(?:\s*-\s*(?P<memory>\d+(?:\.\d+)?\s*(?:gb|gib|g)?))?",
    re.IGNORECASE,
)
_MOST = 1_000_000


def names_cluster(words: object) -> bool:
    """Whether a text counts cards, as no name of a device does."""
    return isinstance(words, str) and re.match(r"\s*\d+\s*[x×*]", words) is not None


def cluster_of(words: str | Cluster) -> Cluster:
    """Return the cluster that the words name: `[NODESx]CARDSxNAME[-MEMORY]`.

    More than 8 cards without a number of nodes are nodes of 8. A card that is not in the table
    needs its memory, and is planned without speed.

    Raises `ConfigurationError` that says what to write.
    """
    if isinstance(words, Cluster):
        return words
    match = _WORDS.fullmatch(words.strip()) if isinstance(words, str) else None
    if match is None:
        raise ConfigurationError(
            f"{shortened(repr(words))} is not a cluster; write {EXAMPLES}", "cluster"
        )
    nodes, count = (int(match[group]) if match[group] else None for group in ("nodes", "count"))
    for number in (nodes, count):
        if number is not None and not 1 <= number <= _MOST:
            raise ConfigurationError(
                f"{shortened(repr(words))} has {number} cards; write {EXAMPLES}", "cluster"
            )
    card = _card_of(match["name"].strip(), match["memory"], words)
    if nodes is not None:
        return Cluster(card, nodes, count or 1)
    count = count or 1
    if count > NODE and count % NODE:
        raise ConfigurationError(
            f"{count} cards do not make whole nodes of {NODE}; say how many a node has, "
            f"such as '{count // 2}x2x{card.name}'",
            "cluster",
        )
    return Cluster(card, max(1, count // NODE), min(count, NODE))


def _card_of(name: str, memory: str | None, words: str) -> Card:
    """Return the card of the table, with `memory` if it is given, or a card without speed."""
    known = [card for key, card in CARDS.items() if key.partition("-")[0] == name.upper()]
    if memory is None:
        if known:
            return known[0]
        names = ", ".join(card.name for card in CARDS.values())
        raise ConfigurationError(
            f"{shortened(name)!r} is not a card that is known ({names}); write its memory too: "
            f"'{shortened(words.strip())}-48GB'",
            "cluster",
        )
    size = memory.strip() if memory.strip()[-1].isalpha() else f"{memory.strip()}GB"
    exact = CARDS.get(f"{name}-{size}".replace(" ", "").upper())
    if exact is not None:
        return exact
    capacity = parse_size(size)
    if capacity < GIB:
        raise ConfigurationError(f"{size} is too little memory for a card", "cluster")
    base = known[0] if known else Card(name, capacity)
    return replace(base, name=f"{name}-{size}", memory=capacity, measured=False)
