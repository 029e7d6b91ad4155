"""The memory of a card in a training on many, against figures that others have published."""

from __future__ import annotations

import pytest

from anydevice._core.record import replace
from anydevice._plan.cards import cluster_of
from anydevice._plan.families import ModelShape
from anydevice._plan.model import shape_of
from anydevice._plan.training_plan import TrainingRun, card_memory

GIB = 2**30


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
