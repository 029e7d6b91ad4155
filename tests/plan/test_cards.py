"""Clusters in words, and the memory of one card of them."""

from __future__ import annotations

import pytest

from anydevice import ConfigurationError
from anydevice._core.record import replace
from anydevice._plan.cards import CARDS, GIB, Cluster, cluster_of, names_cluster
from anydevice._plan.families import ModelShape
from anydevice._plan.model import shape_of
from anydevice._plan.training_plan import TrainingRun, card_memory


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


def llama(layers: int, hidden: int, intermediate: int, heads: int) -> ModelShape:
    sizes = {"layers": layers, "hidden": hidden, "intermediate": intermediate, "heads": heads}
    return shape_of(**sizes, kv_heads=8, vocabulary=128256)


LLAMA_8B = llama(32, 4096, 14336, 32)
LLAMA_70B = llama(80, 8192, 28672, 64)
LLAMA_405B = llama(126, 16384, 53248, 128)
EIGHT = TrainingRun(8192, 2, recompute="selective")
SPLIT = TrainingRun(8192, 16, recompute="full", compiled=True, tensor=8)
STAGES = TrainingRun(8192, 4, recompute="full", compiled=True, tensor=8, pipeline=8)
H200 = TrainingRun(8192, 2, recompute="selective", compiled=True, fused_loss=True)


@pytest.mark.parametrize(
    ("shape", "run", "words", "published"),
    [
        # github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 5
        (LLAMA_8B, EIGHT, "8xH100-96GB", 82.4),
        (LLAMA_8B, replace(EIGHT, compiled=True), "128xH100-96GB", 62.0),
        (LLAMA_8B, TrainingRun(32768, 1, recompute="full", compiled=True), "8xH100-96GB", 83.9),
        (LLAMA_70B, SPLIT, "256xH100-96GB", 71.9),
        (LLAMA_405B, STAGES, "512xH100-96GB", 82.5),
        # benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md
        (LLAMA_8B, H200, "32xH200", 47.96),
    ],
)
def test_published_peaks(shape: ModelShape, run: TrainingRun, words: str, published: float) -> None:
    found = card_memory(shape, run, cluster_of(words)).allocated / GIB
    assert found == pytest.approx(published, rel=0.1)


def test_what_is_split_shrinks_with_the_cards_and_the_rest_does_not() -> None:
    few, many = (card_memory(LLAMA_8B, EIGHT, cluster_of(n)) for n in ("8xH100", "32xH100"))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(few, part) == pytest.approx(4 * getattr(many, part), rel=1e-6)
    assert (few.activations, few.communication) == (many.activations, many.communication)
    assert few.weights == pytest.approx(4 * LLAMA_8B.parameters / 8)
    assert few.optimizer == 2 * few.weights


def test_strategies_and_recomputation_in_their_order() -> None:
    cluster = cluster_of("16xH100")

    def total(**changes: object) -> int:
        return card_memory(LLAMA_8B, replace(EIGHT, **changes), cluster).total

    by_strategy = [total(strategy=each) for each in ("replicate", "shard_gradients", "shard")]
    by_work = [total(recompute=each) for each in ("none", "selective", "full")]
    assert by_strategy == sorted(by_strategy, reverse=True)
    assert by_work == sorted(by_work, reverse=True)
    assert total(fused_loss=True) < total()
    assert total(compiled=True) < total()
    assert total(optimizer="sgd") < total(optimizer="adamw8bit") < total()
    assert total(micro_batch=4) > total()


def test_one_card_has_nobody_to_talk_to() -> None:
    run = replace(EIGHT, strategy="replicate", micro_batch=1)
    alone, two = (card_memory(LLAMA_8B, run, cluster_of(n)) for n in ("H200", "2xH200"))
    assert alone.weights == two.weights
    assert two.communication - alone.communication == 4 * LLAMA_8B.parameters
    assert alone.overhead < two.overhead
