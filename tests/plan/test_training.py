"""Estimates of training: the parts of each way, and ways that do not go together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anydevice import ConfigurationError, estimate_training
from tests.plan.test_estimates import LLAMA

PARTS = ("parameters", "gradients", "optimizer", "master", "activations", "logits", "overhead")


def estimated(**changes: Any) -> Any:
    return estimate_training(LLAMA, **{"context": 64, "batch": 2, **changes})


def count() -> int:
    return int(estimated(optimizer="sgd").gradients) // 4


def test_the_parts_of_each_optimizer() -> None:
    number = count()
    states = {"sgd": 0, "sgd_momentum": 4, "adam": 8, "adamw": 8}
    for optimizer, width in states.items():
        assert estimated(optimizer=optimizer).optimizer == width * number
    eighths = estimated(optimizer="adamw8bit").optimizer
    assert 2 * number < eighths < 2.1 * number


def test_ways_of_precision() -> None:
    number = count()
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
    with_notes = estimate_training(
        {**LLAMA, "quantization_config": {"load_in_8bit": True}}, context=8
    )
    assert "note: " in str(with_notes)


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
