"""Tokens a second on many cards: against published runs, and as physics has it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from anydevice._core.record import replace
from anydevice._plan.cards import cluster_of
from anydevice._plan.families import ModelShape
from anydevice._plan.model import shape_of
from anydevice._plan.training_plan import (
    ERROR,
    FITTED,
    TrainingRun,
    active_parameters,
    step_time,
    tokens_a_second,
)

ROOT = Path(__file__).parents[2]
TABLES = ROOT / ".cache" / "tables"


def mpt(hidden: int, layers: int, heads: int, context: int = 2048) -> ModelShape:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}
    return shape_of({"model_type": "gpt2", "vocab_size": 50368, **sizes})


LLAMA = shape_of(
    layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocabulary=128256
)
SELECTIVE = TrainingRun(8192, 2, recompute="selective")
FULL, NONE = TrainingRun(2048, 8, recompute="full"), TrainingRun(2048, 6)


@pytest.mark.parametrize(
    ("shape", "run", "words", "published"),
    [
        # Tokens a second and card: github.com/mosaicml/llm-foundry,
        # scripts/train/benchmarking/README.md, models of 70, 7, 1.3 and 13 billion parameters
        (mpt(8192, 80, 64), FULL, "512xH100-80GB", 1007),
        (mpt(4096, 32, 32), NONE, "256xH100-80GB", 10119),
        (mpt(2048, 24, 16), replace(NONE, micro_batch=10, reduced=2), "128xA100-40GB", 18647),
        (mpt(5120, 40, 40, 4096), replace(FULL, context=4096, micro_batch=10), "8xA100", 2060),
        # github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 3
        (LLAMA, SELECTIVE, "128xH100-96GB", 5605),
        (LLAMA, replace(SELECTIVE, compiled=True), "128xH100-96GB", 6514),
    ],
)
def test_published_rates(shape: ModelShape, run: TrainingRun, words: str, published: float) -> None:
    cluster = cluster_of(words)
    found = tokens_a_second(shape, run, cluster) / cluster.cards
    assert found == pytest.approx(published, rel=ERROR)


def test_the_constants_are_physical() -> None:
    for name in ("products", "attention"):
        assert 0 < getattr(FITTED, f"h100_{name}") <= 1
        assert 0 < getattr(FITTED, f"a100_{name}") <= 1
    for name in ("link", "network", "overlap", "compiled"):
        assert 0 < getattr(FITTED, name) <= 1
    assert 1 <= FITTED.float8 <= 2
    assert min(FITTED.traffic, FITTED.loss_traffic, FITTED.update_traffic, FITTED.hop) > 0


def test_no_run_is_faster_than_the_card() -> None:
    for words in ("8xH100", "64xA100-40GB", "8xB200", "RTX4090"):
        cluster = cluster_of(words)
        for run in (FULL, NONE, TrainingRun(65536, 4, fused_loss=True)):
            rate = tokens_a_second(LLAMA, run, cluster) / cluster.cards
            assert rate * 6 * (LLAMA.parameters - LLAMA.embedding_parameters) < cluster.card.flops


def test_what_costs_time() -> None:
    eight, sixteen = cluster_of("8xH100"), cluster_of("16xH100")

    def rate(run: TrainingRun, words: str = "8xH100") -> float:
        cluster = cluster_of(words)
        return tokens_a_second(LLAMA, run, cluster) / cluster.cards

    assert rate(replace(NONE, recompute="full")) < rate(replace(NONE, recompute="selective"))
    assert rate(replace(NONE, recompute="selective")) < rate(NONE)
    assert rate(replace(NONE, micro_batch=1)) < rate(NONE)
    assert rate(replace(NONE, context=16384, micro_batch=1)) < 0.9 * rate(NONE)
    assert rate(NONE, "512xH100") < rate(NONE, "128xH100") < rate(NONE, "64xH100")
    assert rate(NONE, "8x2xH100") == rate(NONE, "16xH100")
    assert rate(replace(NONE, float8=True)) > rate(NONE)
    assert (
        step_time(LLAMA, NONE, eight).communication < step_time(LLAMA, NONE, sixteen).communication
    )
    assert step_time(LLAMA, NONE, cluster_of("H100")).communication == 0


def test_the_network_hides_at_most_its_share() -> None:
    time = step_time(LLAMA, replace(NONE, micro_batch=1), cluster_of("64xV100-32GB"))
    computing = time.products + time.attention + time.traffic
    assert time.communication > computing  # a slow network
    assert time.exposed > time.communication - computing
    free = step_time(LLAMA, NONE, cluster_of("8xH100"), replace(FITTED, overlap=1.0))
    assert free.exposed == pytest.approx(0, abs=1e-12)


def test_a_token_passes_some_experts_only() -> None:
    sizes = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "vocabulary": 100}
    mixed = shape_of(**sizes, experts=8, experts_per_token=2, expert_size=128)
    idle = 6 * 3 * 64 * 128 * 2
    assert active_parameters(mixed) == sum(mixed.layer_weights) - idle


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    if not (TABLES / "llm-foundry.md").exists() or not list((TABLES / "torchtitan").glob("*.md")):
        pytest.skip("the published tables are not in .cache/tables; see bench/plan_training.py")
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import plan_training
    finally:
        sys.path.pop(0)
    return plan_training


def test_published_rates_and_what_ran_fits(bench: ModuleType) -> None:
    runs = bench.foundry(TABLES / bench.FOUNDRY)
    fitted_to, held_out = bench.parts(runs)
    assert (len(fitted_to), len(held_out)) == (189, 27)
    assert max(each.cluster.cards for each in fitted_to) == 64
    assert min(each.cluster.cards for each in held_out) == 128
    found = bench.summary([bench.error(each) for each in held_out])
    assert found.median <= 0.06
    assert found.nine_in_ten <= 0.15
    assert found.largest <= min(0.2, ERROR)
    assert bench.summary([bench.error(each) for each in fitted_to]).nine_in_ten <= ERROR
    assert len(runs) == 216
    assert sum(map(bench.fits, runs)) >= 0.97 * len(runs)


def test_the_rates_of_another_program(bench: ModuleType) -> None:
    runs = [each for each in bench.titan(TABLES / bench.TITAN) if not bench.is_split(each.run)]
    assert len(runs) == 9
    assert max(abs(bench.error(each)) for each in runs) <= ERROR


def test_all_published_peaks(bench: ModuleType) -> None:
    found = bench.titan(TABLES / bench.TITAN)
    assert len(found) == 20
    assert max(abs(bench.memory_error(each)) for each in found) <= 0.1


def test_the_committed_constants_are_those_of_the_fit(bench: ModuleType) -> None:
    pytest.importorskip("scipy")
    fitted_to, _ = bench.parts(bench.foundry(TABLES / bench.FOUNDRY))
    shared = bench.fit_compiled(bench.titan(TABLES / bench.TITAN))
    again = replace(bench.fit(fitted_to), compiled=shared)
    for name in type(FITTED)._fields:
        assert getattr(FITTED, name) == pytest.approx(getattr(again, name), rel=0.01), name
