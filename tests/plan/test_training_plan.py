"""`plan_training` and `estimate_training`: memory, placement on a cluster, and time."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy
import pytest

from anydevice import ConfigurationError, estimate_training, plan_training
from anydevice._plan.estimates import plannable
from anydevice._plan.training_plan import RECOMPUTE, STRATEGIES, card_memory, tokens_a_second
from tests.plan.configs import LLAMA_8B, LLAMA_70B
from tests.plan.test_estimates import LLAMA

SMALL = {"layers": 12, "hidden": 768, "intermediate": 2048, "heads": 12, "vocabulary": 32000}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
PARTS = ("parameters", "gradients", "optimizer", "master", "activations", "logits", "overhead")


@pytest.mark.parametrize("vocabulary", [128256, 32000])
@pytest.mark.parametrize("helped", [False, True])
def test_70b_does_not_fit_on_16_cards_of_80_gb(vocabulary: int, helped: bool) -> None:
    model = LLAMA_70B | {"vocab_size": vocabulary}
    plan = plan_training(model, "16xH100-80GB", context=1024, fused_loss=helped, compiled=helped)
    assert not plan.fits
    assert (plan.run.strategy, plan.run.recompute, plan.run.micro_batch) == ("shard", "full", 1)
    assert plan.tokens_per_second is plan.days is plan.error is None
    assert plan.enough is not None
    assert 16 < plan.enough.cards <= 32
    again = {"context": 1024, "fused_loss": helped, "compiled": helped}
    assert plan_training(model, plan.enough, **again).fits
    assert not plan_training(model, plan.enough.of(plan.enough.cards - 8), **again).fits


def test_what_fits_leaves_a_margin() -> None:
    for words in ("8xH100", "16xH100", "8xA100-40GB", "128xA100-40GB", "8xB200", "8xL40S"):
        for context in (512, 2048, 8192, 32768):
            plan = plan_training(LLAMA_8B, words, context=context)
            limit = plannable(plan.free)
            assert plan.fits is (plan.memory.total <= limit)
            assert limit < 0.98 * plan.free


def test_what_is_chosen_is_as_fast_as_anything_that_fits() -> None:
    plan = plan_training(LLAMA_8B, "16xH100", context=4096)
    assert plan.tokens_per_second is not None
    for strategy, recompute, size in product(STRATEGIES, RECOMPUTE, (1, 2, 4, 8, 16)):
        way: dict[str, Any] = {"strategy": strategy, "recompute": recompute, "micro_batch": size}
        other = plan_training(LLAMA_8B, "16xH100", context=4096, **way)
        assert (other.run.strategy, other.run.micro_batch) == (strategy, size)
        if other.tokens_per_second is not None:
            assert other.fits
            assert plan.tokens_per_second >= 0.979 * other.tokens_per_second


def test_a_small_model_is_replicated_where_steps_are_long() -> None:
    plan = plan_training(cluster="8xA100", context=1024, batch=4096, **SMALL)
    assert (plan.fits, plan.run.strategy, plan.run.recompute) == (True, "replicate", "none")
    assert plan.run.accumulate > 1


def test_days_follow_from_tokens_and_speed() -> None:
    plan = plan_training(LLAMA_8B, "16xH100", tokens="2T", context=8192)
    assert plan.tokens == 2 * 10**12
    assert plan.tokens_per_second is not None
    assert plan.days == pytest.approx(2e12 / plan.tokens_per_second / 86400)
    rate = tokens_a_second(plan.shape, plan.run, plan.cluster)
    assert plan.tokens_per_second == pytest.approx(rate)
    assert plan_training(LLAMA_8B, "16xH100", tokens=2e12, context=8192).days == plan.days
    assert plan_training(LLAMA_8B, "16xH100", context=8192).days is None


def test_a_batch_is_kept_to() -> None:
    plan = plan_training(LLAMA_8B, "16xH100", batch=256, context=4096)
    assert plan.batch == 256
    assert plan.run.accumulate == 256 // 16 // plan.run.micro_batch
    one = plan_training(LLAMA_8B, "16xH100", batch=16, context=4096)
    assert (one.run.micro_batch, one.run.accumulate) == (1, 1)
    with pytest.raises(ConfigurationError, match="less than one micro-batch for each of 16 cards"):
        plan_training(LLAMA_8B, "16xH100", batch=15)


def test_the_error_is_stated_and_larger_where_nobody_has_published() -> None:
    measured = plan_training(LLAMA_8B, "16xH100")
    other = plan_training(LLAMA_8B, "16xH200")
    assert (measured.error, measured.notes) == (0.15, ())
    assert other.error == 0.4
    assert "no published run on H200-141GB" in other.notes[0]
    assert "512 cards" in plan_training(LLAMA_8B, "1024xH100").notes[0]


def test_a_card_of_ones_own_has_memory_and_no_speed() -> None:
    plan = plan_training(LLAMA_8B, "8xMyCard-48GB", tokens="1T")
    assert plan.fits
    assert plan.tokens_per_second is plan.days is plan.error is None
    assert "speed of MyCard-48GB is not known" in plan.notes[0]
    assert not plan_training(LLAMA_8B, "8xMyCard-24GB").fits


def test_the_context_is_the_models_where_that_is_less() -> None:
    short = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    assert plan_training({**short, "vocab_size": 50257}, "H100").run.context == 1024
    assert plan_training(LLAMA_8B, "16xH100").run.context == 4096


def test_as_json() -> None:
    plan = plan_training(LLAMA_8B, "16xH100", tokens="2T")
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["cluster"] == "16xH100-80GB"
    assert data["cards"] == 16
    assert data["memory"]["total"] == card_memory(plan.shape, plan.run, plan.cluster).total
    assert sum(data["memory"].values()) == 2 * data["memory"]["total"]
    assert data["days"] == pytest.approx(plan.days, abs=1e-3)


def test_as_text_and_in_a_notebook() -> None:
    plan = plan_training(LLAMA_8B, "16xH100", tokens="2T", context=8192)
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    assert "✓ fits on 16xH100-80GB" in text
    assert "± 15 %" in text
    page = plan._repr_html_()
    assert "fits on 16xH100-80GB" in page
    assert "tokens a second" in page
    assert "32xH100-80GB would do" in " ".join(str(plan_training(LLAMA_70B, "16xH100")).split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": BERT}, "bert is not a decoder"),
        ({"model": {"w": numpy.zeros((3, 4), numpy.float32)}}, "give its config or its dimensions"),
        ({"cluster": None}, "no cluster is given; write one, such as '16xH100-80GB'"),
        ({"cluster": "2xQ7"}, "'2xQ7-48GB'"),
        ({"tokens": 0}, "such as 2e12 or '2T'"),
        ({"tokens": "2 fortnights"}, "such as 2e12 or '2T'"),
        ({"tokens": float("nan")}, "such as 2e12 or '2T'"),
        ({"tokens": [2]}, "such as 2e12 or '2T'"),
        ({"strategy": "magic"}, "strategy is one of replicate, shard_gradients, shard"),
        ({"recompute": "half"}, "recompute is one of none, selective, full"),
        ({"optimizer": "magic"}, "optimizer is one of sgd"),
        ({"micro_batch": 0}, "micro_batch must be an integer of 1 or more"),
        ({"context": -1}, "context must be an integer of 1 or more"),
        ({"context": 0}, "context must be an integer of 1 or more"),
    ],
)
def test_wrong_options_say_what_to_write(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        plan_training(**{"model": LLAMA_8B, "cluster": "8xH100", **options})
    assert said in str(raised.value)


def test_compiled_layers_are_faster_and_smaller() -> None:
    fixed: dict[str, Any] = {"context": 4096, "recompute": "selective", "micro_batch": 1}
    plain = plan_training(LLAMA_8B, "16xH100", **fixed)
    compiled = plan_training(LLAMA_8B, "16xH100", compiled=True, **fixed)
    assert compiled.memory.total < plain.memory.total
    assert plain.tokens_per_second is not None
    assert compiled.tokens_per_second is not None
    assert 1.05 < compiled.tokens_per_second / plain.tokens_per_second < 1.3


def estimated(**changes: Any) -> Any:
    return estimate_training(LLAMA, **{"context": 64, "batch": 2, **changes})


def count() -> int:
    return int(estimated(optimizer="sgd").gradients) // 4


def test_the_parts_of_each_optimizer_and_precision() -> None:
    number = count()
    states = {"sgd": 0, "sgd_momentum": 4, "adam": 8, "adamw": 8}
    for optimizer, width in states.items():
        assert estimated(optimizer=optimizer).optimizer == width * number
    eighths = estimated(optimizer="adamw8bit").optimizer
    assert 2 * number < eighths < 2.1 * number
    plain, mixed = estimated(), estimated(mixed=True)
    assert plain.gradients == mixed.gradients == 4 * number
    narrow = estimated(dtype="bfloat16")
    assert (narrow.gradients, narrow.optimizer, narrow.master) == (2 * number, 4 * number, 0)
    kept = estimated(dtype="bfloat16", master=True)
    assert (kept.gradients, kept.optimizer, kept.master) == (2 * number, 8 * number, 4 * number)
    assert narrow.activations < plain.activations


def test_checkpointing_saves_activations_and_nothing_else() -> None:
    plain, again = estimated(batch=64), estimated(batch=64, checkpointing=True)
    assert again.activations < plain.activations / 3
    assert again.total < plain.total
    assert again.logits == plain.logits == 3 * 4 * 64 * 64 * LLAMA["vocab_size"]


def test_the_peak_is_at_the_fullest_moment() -> None:
    cases = ((2, 200, "step"), (2048, 200, "last layer"), (2048, 9000, "loss"))
    for context, vocabulary, moment in cases:
        estimate = estimate_training({**LLAMA, "vocab_size": vocabulary}, context=context)
        assert estimate.peak_at == moment
        assert estimate.total > estimate.parameters + estimate.optimizer + estimate.overhead


def test_it_can_be_printed_and_written() -> None:
    estimate = estimated(mixed=True)
    assert all(part in str(estimate) for part in PARTS)
    assert "mixed precision" in str(estimate)
    plain = estimate.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["total_gib"] == estimate.total_gib
    noted = estimate_training({**LLAMA, "quantization_config": {"load_in_8bit": True}}, context=8)
    assert "note: " in str(noted)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_networks_without_gates(activation: str) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    estimate = estimate_training({**gpt2, "activation_function": activation}, context=32, batch=16)
    assert estimate.exact
    assert estimate.activations > 0


def test_experts_and_scores_in_memory_take_more() -> None:
    experts = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    assert estimate_training(experts, context=64).activations > estimated(batch=1).activations
    eager = {**LLAMA, "model_type": "gemma2", "head_dim": 16}
    long, short = (estimate_training(eager, context=size).activations for size in (2048, 1024))
    assert long > 3 * short


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimizer": "lion"}, "unknown optimizer 'lion'; known are sgd"),
        ({"dtype": "int8"}, "cannot be trained in int8"),
        ({"dtype": "float8_e4m3fn"}, "cannot be trained"),
        ({"mixed": True, "dtype": "bfloat16"}, "needs parameters in float32"),
        ({"master": True}, "for parameters of 16 bits"),
        ({"context": 0}, "context must be an integer of 1 or more"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        estimated(**arguments)
