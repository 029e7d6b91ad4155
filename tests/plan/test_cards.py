"""Clusters in words: what is understood, and what is said where it is not."""

from __future__ import annotations

import pytest

from anydevice import ConfigurationError
from anydevice._plan.cards import CARDS, GIB, Cluster, cluster_of, names_cluster


@pytest.mark.parametrize(
    ("words", "card", "nodes", "per_node"),
    [
        ("16xH100-80GB", "H100-80GB", 2, 8),
        ("2xH100", "H100-80GB", 1, 2),
        ("4x8xA100-40GB", "A100-40GB", 4, 8),
        ("3x4xA100", "A100-80GB", 3, 4),
        ("h200", "H200-141GB", 1, 1),
        (" 8 × a100-40gb ", "A100-40GB", 1, 8),
        ("512xH100-80", "H100-80GB", 64, 8),
        ("8xMyCard-48GB", "MyCard-48GB", 1, 8),
    ],
)
def test_clusters_in_words(words: str, card: str, nodes: int, per_node: int) -> None:
    cluster = cluster_of(words)
    assert (cluster.card.name, cluster.nodes, cluster.per_node) == (card, nodes, per_node)
    assert cluster_of(str(cluster)) == cluster


def test_a_known_card_with_another_memory_keeps_its_speed() -> None:
    card = cluster_of("8xH100-94GB").card
    assert card.memory == 94_000_000_000
    assert card.flops == CARDS["H100-80GB"].flops
    assert not card.measured


def test_memory_as_programs_find_it_is_less_than_the_name_says() -> None:
    for card in CARDS.values():
        named = int(card.name.partition("-")[2].removesuffix("GB"))
        assert 0.9 * named <= card.memory / GIB < named
        assert 0 < card.flops < 1e16
        assert card.network <= card.link * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("2xQ7", "'2xQ7-48GB'"),
        ("Q7", "H100-80GB"),
        ("12xH100", "'6x2xH100-80GB'"),
        ("0xH100", "'16xH100-80GB'"),
        ("2x0xH100", "'16xH100-80GB'"),
        ("x", "is not a card that is known"),
        ("", "'16xH100-80GB'"),
        ("16", "'16xH100-80GB'"),
        ("2xH100-lots", "'16xH100-80GB'"),
        ("8xMyCard-0GB", "too little memory"),
        (7, "'16xH100-80GB'"),
        ("9" * 30 + "xH100", "'16xH100-80GB'"),
    ],
)
def test_what_is_not_understood_says_what_to_write(words: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write|too little|known|say how many") as raised:
        cluster_of(words)  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_names_of_devices_are_no_clusters() -> None:
    for name in ("cuda", "cuda:0", "gpu", "cpu", "opencl:1", None, 3):
        assert not names_cluster(name)


def test_more_of_the_same() -> None:
    assert cluster_of("3x4xA100").of(24) == Cluster(CARDS["A100-80GB"], 6, 4)
    assert str(cluster_of("H100").of(16)) == "16xH100-80GB"
