"""Plans: on one device, on several, with the CPU, or which change would make a model fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import anydevice
from anydevice import plan_inference, testing
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._plan.estimates import CONTEXT, MARGIN, estimate_inference
from anydevice._plan.model import shape_of
from anydevice._plan.plan import Plan
from anydevice.errors import ConfigurationError
from tests.plan.configs import LLAMA_8B

GIB = 2**30
ASKED: dict[str, Any] = {"context": 8192, "batch": 4}
TOTAL = estimate_inference(LLAMA_8B, **ASKED).total


def room_for(total: int) -> int:
    """The bytes that a card must have free, so that a model that needs so many fits there."""
    return -(-total * (100 + MARGIN) // 100)


def planned(
    devices: Any = "cuda", model: Any = LLAMA_8B, asked: dict[str, Any] = ASKED, **machine: Any
) -> Plan:
    """The plan on a fake machine, by default of `ASKED` with one card."""
    with testing.fake_machine(**{"cuda": 1, **machine}):
        return plan_inference(model, devices, **asked)


def cpu_with(memory: int) -> BackendScan:
    """A CPU of that memory; what is really free here may be less, so it is small in tests."""
    facts = Facts("a small CPU", memory_kind="host", total_memory=memory, usable_memory=memory)
    return BackendScan("cpu", True, (RawDevice(0, "cpu", facts),), engines=("numpy", "torch"))


def whole(plan: Plan) -> None:
    """Every layer lies in one place, and no device holds more than it has."""
    layers = [layer for placement in plan.placements for layer in placement.layers]
    assert layers == list(range(LLAMA_8B["num_hidden_layers"]))
    assert all(placement.share <= 1 for placement in plan.placements)
    assert sum(placement.parts.kv_cache for placement in plan.placements) == plan.estimate.kv_cache


def test_the_byte_between_fitting_and_not() -> None:
    plan = planned(memory=room_for(TOTAL))
    assert (plan.fits, str(plan.device), plan.alternatives) == (True, "cuda:0", ())
    assert plan.placements[0].share == pytest.approx(1 / 1.03)
    assert plan.placements[0].parts.total == plan.estimate.total == TOTAL
    plan = planned(memory=room_for(TOTAL) - 1)
    assert (plan.fits, plan.device) == (False, None)
    assert plan.placements[0].share > 0.97
    assert plan.unplaced > 0
    assert " and 3 % more needed, " in str(plan)
    plan = planned(memory=TOTAL - 1)
    assert plan.placements[0].share > 1
    assert "% more" not in str(plan)


def test_the_processor_keeps_no_margin() -> None:
    small = {**LLAMA_8B, "num_hidden_layers": 2, "vocab_size": 1000}
    needed = estimate_inference(small, context=128).on_cpu().total
    for memory, fits in ((needed, True), (needed - 1, False)):
        assert (
            planned("cpu", small, {"context": 128}, cuda=0, scans=[cpu_with(memory)]).fits is fits
        )


def test_the_free_memory_of_each_card_counts() -> None:
    assert not planned(memory=2 * TOTAL, free=TOTAL - 1).fits
    free = [room_for(TOTAL), 2 * TOTAL, room_for(TOTAL)]
    assert str(planned(None, cuda=3, memory=2 * TOTAL, free=free).device) == "cuda:1"


def test_over_uneven_cards_the_larger_gets_more_layers() -> None:
    plan = planned(cuda=2, memory=TOTAL, free=[TOTAL // 2, TOTAL - GIB])
    whole(plan)
    assert (plan.fits, plan.device) == (True, None)
    small, large = plan.placements
    assert [str(each.device) for each in plan.placements] == ["cuda:0", "cuda:1"]
    assert len(large.layers) > len(small.layers)
    assert abs(small.share - large.share) < 0.12, "each is filled to about the same share"
    assert small.parts.logits == 0
    assert large.parts.logits == plan.estimate.logits
    assert small.parts.activations == large.parts.activations == plan.estimate.activations


def test_no_more_cards_than_it_takes() -> None:
    plan = planned(None, cuda=8, memory=int(0.95 * TOTAL))
    whole(plan)
    assert len(plan.placements) == 2
    one = [each for each in plan.alternatives if each.change == "context"]
    assert len(one) == 1, "a smaller context would do with one card"
    assert [str(device) for device in one[0].devices] == ["cuda:0"]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_several_devices_are_those_of_the_model(tied: bool) -> None:
    model = {**LLAMA_8B, "tie_word_embeddings": tied}
    plan = planned(model=model, cuda=2, memory=int(0.8 * TOTAL))
    whole(plan)
    assert len(plan.placements) == 2
    copied = shape_of(model).embedding_bytes if tied else 0
    weights = sum(placement.parts.weights for placement in plan.placements)
    assert weights == plan.estimate.weights + copied


def test_the_cpu_takes_what_the_card_has_no_room_for() -> None:
    shape = shape_of(LLAMA_8B)
    estimate = estimate_inference(LLAMA_8B, **ASKED)
    layer = shape.layer_bytes[-1] + shape.kv_bytes(8192, 4)[-1]
    # All but the last two layers and the head; the CPU has room for them and no more.
    spilled = shape.head_bytes + 2 * layer + estimate.logits
    # It takes no overhead there.
    scans = [cpu_with(spilled + estimate.activations)]
    plan = planned(None, memory=room_for(TOTAL - spilled), scans=scans)
    whole(plan)
    card, cpu = plan.placements
    assert [str(card.device), str(cpu.device)] == ["cuda:0", "cpu"]
    assert (card.layers, cpu.layers) == (range(30), range(30, 32))
    assert cpu.parts.overhead == 0 < card.parts.overhead < estimate.overhead
    assert "context" in {each.change for each in plan.alternatives}
    assert all(str(device) != "cpu" for each in plan.alternatives for device in each.devices)


def test_a_card_without_room_for_a_layer_leaves_all_to_the_cpu() -> None:
    small = {**LLAMA_8B, "num_hidden_layers": 2, "vocab_size": 1000}
    estimate = estimate_inference(small, context=128).on_cpu()
    with testing.fake_machine(cuda=1, memory=2**20, scans=[cpu_with(estimate.total)]):
        plan = plan_inference(small, context=128)
    assert (plan.fits, str(plan.device)) == (True, "cpu")
    assert plan.estimate.total == plan.placements[0].parts.total == estimate.total


def test_the_cpu_alone_is_not_charged_what_only_a_card_takes() -> None:
    estimate = estimate_inference(LLAMA_8B, context=128).on_cpu()
    with testing.fake_machine(scans=[cpu_with(estimate.total - 2**20)]):
        plan = plan_inference(LLAMA_8B, "cpu", context=128)
    assert not plan.fits
    assert plan.estimate.total == plan.placements[0].parts.total == estimate.total
    assert any(each.total < estimate.total for each in plan.alternatives)


def test_what_would_fit_is_the_largest_that_does() -> None:
    room = int(0.9 * TOTAL)
    with testing.fake_machine(cuda=1, memory=room):
        plan = plan_inference(LLAMA_8B, "cuda", **ASKED)
        found = {each.change: each for each in plan.alternatives}
        context, batch = found["context"].value, found["batch"].value
        assert isinstance(context, int)
        assert isinstance(batch, int)
        assert plan_inference(LLAMA_8B, "cuda", context=context, batch=4).fits
        assert not plan_inference(LLAMA_8B, "cuda", context=context + 1, batch=4).fits
        assert plan_inference(LLAMA_8B, "cuda", context=8192, batch=batch).fits
        assert not plan_inference(LLAMA_8B, "cuda", context=8192, batch=batch + 1).fits
    assert found["weights"].value == "q8_0"
    assert "dtype" not in found
    assert all(each.total <= room for each in found.values())


def test_a_model_of_32_bits_is_offered_in_16() -> None:
    room = int(0.6 * estimate_inference(LLAMA_8B, dtype="float32", **ASKED).total)
    with testing.fake_machine(cuda=1, memory=room):
        plan = plan_inference(LLAMA_8B, "cuda", dtype="float32", kv_dtype="bfloat16", **ASKED)
        found = {each.change: each for each in plan.alternatives}
        assert found["dtype"].value == "bfloat16"
        assert plan_inference(LLAMA_8B, "cuda", kv_dtype="bfloat16", **ASKED).fits


def test_a_smaller_cache_is_offered_where_that_is_enough() -> None:
    asked = {"context": 65536, "batch": 4}
    estimate = estimate_inference(LLAMA_8B, **asked)
    with testing.fake_machine(cuda=1, memory=estimate.total - estimate.kv_cache // 3):
        plan = plan_inference(LLAMA_8B, "cuda", **asked)
        found = {each.change: each for each in plan.alternatives}
        assert found["kv_dtype"].value == "float8_e4m3fn"
        assert plan_inference(LLAMA_8B, "cuda", kv_dtype="float8_e4m3fn", **asked).fits


def test_what_is_small_already_is_offered_only_smaller() -> None:
    asked = {**ASKED, "dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
    total = estimate_inference(LLAMA_8B, **asked).total
    plan = planned(asked=asked, memory=int(0.95 * total))
    found = {each.change: each.value for each in plan.alternatives}
    assert found.pop("weights") == "q4_k"
    assert set(found) == {"context", "batch"}
    bits = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    total = estimate_inference({**LLAMA_8B, **bits}, **ASKED).total
    plan = planned(model={**LLAMA_8B, **bits}, memory=int(0.95 * total))
    assert [each.change for each in plan.alternatives] == ["context", "batch", "kv_dtype"]


def test_where_nothing_helps_the_bars_show_how_far_it_goes() -> None:
    plan = planned(["cuda:0", "cuda:1"], cuda=2, memory="1GiB", free=[GIB, 2**20])
    assert (plan.fits, plan.alternatives) == (False, ())
    assert [str(each.device) for each in plan.placements] == ["cuda:0", "cuda:1"]
    assert plan.placements[1].layers == range(0)
    assert plan.placements[1].parts.total == 0
    assert "No smaller context" in str(plan)


def test_a_limit_that_was_set_is_kept_to() -> None:
    counted = room_for(TOTAL) - CONTEXT
    with testing.fake_machine(cuda=1, memory=2 * TOTAL):
        anydevice.configure(memory=f"{counted}B")
        assert plan_inference(LLAMA_8B, "cuda", **ASKED).fits
        anydevice.configure(memory=f"{counted - 1}B")
        assert not plan_inference(LLAMA_8B, "cuda", **ASKED).fits
        anydevice.configure(memory=0.4)
        assert not plan_inference(LLAMA_8B, "cuda", **ASKED).fits


def test_forms_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--org--name" / "snapshots" / "a"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with testing.fake_machine(cuda=1, memory=TOTAL - 1):
        plans = [
            plan_inference(model, "cuda", **ASKED)
            for model in (folder, folder / "config.json", "org/name", shape_of(LLAMA_8B))
        ]
    assert {plan.estimate.total for plan in plans} == {TOTAL}
    assert all(plan.alternatives for plan in plans)
    assert str(plans[2]).startswith("org/name: 8.03 B parameters in bfloat16,")


def test_as_plain_data() -> None:
    data = planned(cuda=2, memory=int(0.7 * TOTAL)).to_dict()
    again = json.loads(json.dumps(data))
    assert again == data
    assert again["fits"] is True
    assert again["device"] is None
    assert again["estimate"]["total"] == TOTAL
    assert again["placements"][0]["layers"][0] == 0
    assert again["placements"][1]["layers"][1] == 31
    assert {"weights", "kv_cache", "total", "free", "share"} <= set(again["placements"][0])
    assert {"change", "value", "devices", "total"} == set(again["alternatives"][0])


def test_a_model_may_be_the_numbers_of_its_shape() -> None:
    numbers = {"layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32}
    numbers |= {"kv_heads": 8, "vocabulary": 128256}
    with testing.fake_machine(cuda=1, memory=TOTAL // 2):
        plan = plan_inference(None, "cuda", **ASKED, dtype="float32", **numbers)
    assert plan.estimate == estimate_inference(**ASKED, dtype="float32", **numbers)
    assert not plan.fits
    with testing.fake_machine(cuda=1, memory=2 * TOTAL - 8 * GIB):
        plan = plan_inference(devices="cuda", **ASKED, dtype="float32", **numbers)
    assert "dtype" in {each.change for each in plan.alternatives}
    with pytest.raises(ConfigurationError, match="unknown dimension"):
        plan_inference(context=8, stories=2)


def test_quantized_by_request_is_what_the_advice_says() -> None:
    with testing.fake_machine(cuda=1, memory=int(0.72 * TOTAL)):
        plan = plan_inference(LLAMA_8B, "cuda", **ASKED)
        advice = {each.change: each for each in plan.alternatives}
        advised = advice["weights"]
        assert advised.value == "q4_k"
        assert "4.6 bits a weight, and somewhat worse texts" in " ".join(str(plan).split())
        plan = plan_inference(LLAMA_8B, "cuda", **ASKED, weights="q4_k")
    assert (plan.fits, plan.estimate.total) == (True, advised.total)
    assert str(plan).startswith("llama: 8.03 B parameters in q4_k, kv-cache in bfloat16")


def test_a_very_long_name_is_shortened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("x" * 6000, "org/" + "y" * 6000, "~nobody-of-this-name/" + "z" * 6000):
        with pytest.raises(ConfigurationError, match="there is no such file") as caught:
            plan_inference(name, context=8)
        assert len(str(caught.value)) < 600
    with testing.fake_machine(cuda=1):
        plan = plan_inference({**LLAMA_8B, "_name_or_path": "n" * 6000}, "cuda", context=8)
    assert max(map(len, str(plan).splitlines())) <= 80


def test_a_device_that_does_not_tell_its_memory_is_not_counted() -> None:
    silent = BackendScan("tpu", True, (RawDevice(0, "tpu", Facts("a TPU")),), engines=("jax",))
    with testing.fake_machine(scans=[silent]):
        plan = plan_inference(LLAMA_8B, "tpu", **ASKED)
    assert not plan.fits
    assert plan.notes == ("tpu:0 does not tell how much memory it has: it is not counted",)
    assert "no device tells its memory" in str(plan)
