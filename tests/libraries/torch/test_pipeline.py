"""Modules of PyTorch and Hugging Face in several places: results, trainings, plans, wrong input."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, parallel, testing
from anydevice._core.record import replace
from anydevice._parallel.pipeline_modules import pipeline_of
from anydevice.errors import ConfigurationError, DeviceMismatchError, UnsupportedError
from tests.comparing import assert_close, assert_same_bits, assert_same_integers

torch = pytest.importorskip("torch")
CARDS = ["cuda:0", "cuda:1", "cuda:2"]


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 60}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


IDS = torch.arange(10)[None] % 7

_TERMS = 4 * (4 * 32 + 64 + 10) + 32
"""Roundings on the path through four layers: projections, the wide layer, and attention."""


def _module() -> Any:
    torch.manual_seed(0)
    first = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)
    return torch.nn.Sequential(*first, torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))


def _data() -> nn.Batches:
    x = np.random.default_rng(0).standard_normal((50, 16)).astype("float32")
    return nn.Batches(x, x[:, :4].argmax(1), size=16)


def _plan(module: Any, **parts: range) -> Any:
    """The plan of a module, on devices that are said here."""
    plan = anydevice.plan_inference(module, context=16)
    placements = [
        replace(plan.placements[0], device=anydevice.Device(name.replace("_", ":")), layers=layers)
        for name, layers in parts.items()
    ]
    return replace(plan, placements=tuple(placements))


def test_a_model_of_hugging_face_lies_as_its_plan_says(llama: Any) -> None:
    with torch.no_grad():
        wanted = llama(input_ids=IDS).logits
    with testing.fake_machine(cuda=2):
        plan = _plan(llama, cuda_0=range(1), cuda_1=range(1, 3), cpu=range(3, 4))
        model = parallel.pipeline(copy.deepcopy(llama), plan)
        found = pipeline_of(model)
        assert found is not None
        assert {name: str(place) for name, place in found.places.items()} == {
            "model.embed_tokens": "cuda:0",
            "model.layers.0": "cuda:0",
            "model.layers.1": "cuda:1",
            "model.layers.2": "cuda:1",
            "model.layers.3": "cpu for cuda:1",
            "model.norm": "cpu for cuda:1",
            "model.rotary_emb": "cuda:0",
            "lm_head": "cpu for cuda:1",
        }
        ids = anydevice.to_device(IDS, "cuda:0")
        with torch.no_grad():
            for _ in range(2):
                logits = model(input_ids=ids).logits
        assert str(anydevice.device_of(logits)) == "cuda:1"
        assert_close(logits, wanted, terms=_TERMS)
        with pytest.raises(DeviceMismatchError, match="input_ids is on cpu, and the pipeline"):
            model(input_ids=IDS)


def test_a_plan_is_a_device_map_for_other_libraries(llama: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    plan = _plan(llama, cuda_0=range(3), cpu=range(3, 4))
    with torch.device("meta"):
        empty = type(llama)(llama.config)
    found = plan.device_map(empty)
    assert found["model.layers.2"] == found["model.rotary_emb"] == "cuda:0"
    assert found["model.layers.3"] == found["lm_head"] == "cpu"
    accelerate.utils.check_device_map(empty, found)
    llama.save_pretrained(tmp_path)
    on_cpu = _plan(llama, cpu=range(4)).device_map(empty)
    loaded = type(llama).from_pretrained(tmp_path, device_map=on_cpu)
    with torch.no_grad():
        assert_close(loaded(input_ids=IDS).logits, llama(input_ids=IDS).logits, terms=_TERMS)


def test_layers_on_disk_generate_the_same_text(llama: Any, tmp_path: Path) -> None:
    model = parallel.pipeline(copy.deepcopy(llama), ["cpu", "disk"], folder=tmp_path)
    options: dict[str, Any] = {
        "max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS),
        "pad_token_id": 0,
    }  # fmt: skip
    assert_same_integers(model.generate(IDS, **options), llama.generate(IDS, **options))
    own = llama.state_dict()
    for name, x in model.state_dict().items():
        assert_same_bits(x, own[name], because="it was written to a file and read")


def test_a_tied_head_stays_with_the_embedding() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    with testing.fake_machine(cuda=2):
        laid = parallel.pipeline(copy.deepcopy(model), CARDS[:2])
        found = pipeline_of(laid)
        assert found is not None
        assert str(found.places["lm_head"]) == "cuda:0"
        assert str(found.places["transformer.ln_f"]) == "cuda:1"
        with torch.no_grad():
            logits = laid(input_ids=anydevice.to_device(IDS, "cuda:0")).logits
            assert_close(logits, wanted, terms=_TERMS)


def test_trainings_of_modules_have_the_losses_of_one_device() -> None:
    options: dict[str, Any] = {"epochs": 2, "seed": 3, "progress": False}
    one = nn.train(_module(), _data(), nn.AdamW(1e-2), "cross_entropy", device="cpu", **options)

    def same(module: Any, **more: Any) -> Any:
        found = nn.train(module, _data(), nn.AdamW(1e-2), "cross_entropy", **more, **options)
        for a, b in zip(one.history, found.history, strict=True):
            assert abs(a.loss - b.loss) <= 1e-6
        return found.report

    with (
        testing.fake_machine(cuda=3),
        anydevice._machine.engines.registry.load("torch").serial_scope(),
    ):
        assert "3 devices" in same(_module(), devices=CARDS, strategy="pipeline").spread
        same(parallel.pipeline(_module(), CARDS, microbatches=3))
        assert "in host memory" in same(parallel.pipeline(_module(), ["cuda:0", "cpu"])).spread


def test_a_loss_that_is_no_mean_over_rows_is_found_where_batches_are_divided() -> None:
    def masked(output: Any, y: Any) -> Any:  # as of tokens, some of which do not count
        return torch.nn.functional.cross_entropy(output, torch.where(y == 1, -100, y))

    with testing.fake_machine(cuda=3):
        module = parallel.pipeline(_module(), CARDS, microbatches=3)
        with pytest.raises(UnsupportedError, match=r"batch 1 is .* as the mean of 3 micro"):
            nn.train(module, _data(), nn.AdamW(1e-2), masked, epochs=1, seed=1, progress=False)
        whole = parallel.pipeline(_module(), CARDS)
        nn.train(whole, _data(), nn.AdamW(1e-2), masked, epochs=1, seed=1, progress=False)
        # Until the eighth batch, none of its rows is masked.
        x, y = next(iter(_data()(1, 1)))
        batches = [(x, np.where(y == 1, 0, y)) for _ in range(7)] + [(x, y)] * 2
        module = parallel.pipeline(_module(), CARDS, microbatches=3)
        with pytest.raises(UnsupportedError, match=r"batch 8 is .* as the mean of 3 micro"):
            nn.train(module, batches, nn.AdamW(1e-2), masked, epochs=1, seed=1, progress=False)


def test_a_loop_of_ones_own_trains_a_model_of_hugging_face(llama: Any) -> None:
    def losses(model: Any, **more: Any) -> list[float]:
        rows = [{"input_ids": (IDS + n) % 60, "labels": (IDS + n) % 60} for n in range(3)]
        training = nn.Training(model, nn.AdamW(1e-2), rows, seed=1, **more)
        return [float(training.step(batch)) for _ in training.epochs(2) for batch in training]

    one = losses(copy.deepcopy(llama), device="cpu")
    with testing.fake_machine(cuda=2):
        # With its head beside the labels: transformers moves these to where the logits are, by
        # names that only real devices have.
        places = {"": "cuda:0", "model.layers": "cuda:1"}
        several = losses(parallel.pipeline(copy.deepcopy(llama), places))
    assert one[-1] < one[0]
    np.testing.assert_allclose(several, one, atol=1e-6)


def test_wrong_input_says_what_is_wrong(llama: Any) -> None:
    with pytest.raises(ConfigurationError, match="has no list of layers"):
        parallel.pipeline(torch.nn.Linear(2, 2), ["cpu"])
    with pytest.raises(ConfigurationError, match=r"no layer 'model\.layer'; its layers are"):
        parallel.pipeline(copy.deepcopy(llama), {"model.layer": "cpu"})
    other = replace(_plan(llama, cpu=range(4)), estimate=replace(
        (plan := _plan(llama, cpu=range(4))).estimate,
        shape=replace(plan.estimate.shape, head_parameters=1, exact=True),
    ))  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"another model: it has .* parameters"):
        other.device_map(llama)
    with pytest.raises(ConfigurationError, match="it has 3 layers, and this model 4"):
        parallel.pipeline(copy.deepcopy(llama), _plan(llama, cpu=range(3)))
    laid = parallel.pipeline(_module(), ["cpu", "disk"])
    with pytest.raises(ConfigurationError, match="already a pipeline"):
        parallel.pipeline(laid, ["cpu"])
    with pytest.raises(UnsupportedError, match="layers on disk cannot be trained"):
        nn.Training(laid, nn.AdamW(1e-2), _data(), "cross_entropy")


@pytest.mark.parametrize("way", ["written to", "trained", "loaded"])
def test_what_was_brought_ahead_is_brought_again_where_it_was_changed(way: str) -> None:
    x = torch.ones(2, 16)
    with testing.fake_machine(cuda=1):
        held = parallel.pipeline(_module().eval(), {"0": "cuda:0", "1": "cuda:0", "": "cpu"})
        here = anydevice.to_device(x, "cuda:0")
        with torch.no_grad():
            before = held(here)
        time.sleep(0.2)  # until the first layers have been brought for the next call
        if way == "written to":
            with torch.no_grad():
                held[2].weight.mul_(2)
        elif way == "loaded":
            held.load_state_dict({name: 2 * each for name, each in _module().state_dict().items()})
        else:
            nn.train(held, _data(), nn.AdamW(1e-1), "cross_entropy", epochs=1, progress=False)
        held.eval()
        with torch.no_grad():
            after = held(here)
        plain = _module().eval()
        plain.load_state_dict({n: each.clone() for n, each in held.state_dict().items()})
    assert (before != after).any()
    with torch.no_grad():
        torch.testing.assert_close(after, plain(x), atol=1e-6, rtol=0)


def test_a_move_that_a_module_forgets_is_a_mismatch() -> None:
    class Forgetful(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return x + self.layers[1](self.layers[0](x))

    with testing.fake_machine(cuda=2):
        model = parallel.pipeline(Forgetful(), CARDS[:2])
        with pytest.raises(DeviceMismatchError):
            model(anydevice.to_device(torch.ones(1, 4), "cuda:0"))
