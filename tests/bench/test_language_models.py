"""Speeds of a language model beside what its device allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydevice import device, llm
from anydevice._bench import language_models, measure
from anydevice._bench.language_models import bench_text, bytes_of, operations_of
from anydevice._bench.results import Ceiling
from anydevice._plan.model import shape_of
from anydevice._report.benchmark import text_lines
from anydevice.cli.main import main
from anydevice.errors import ConfigurationError
from tests.llm.conftest import data

SMALL: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 256}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 1000, "tie_word_embeddings": True}
LAYER = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 256 + 2 * 64


@pytest.fixture(scope="session")
def stories() -> Path:
    pytest.importorskip("tokenizers", reason="tokenizers are not installed")
    return data("stories260K")


@pytest.fixture(scope="session")
def model(stories: Path) -> Any:
    return llm.load(stories, device("cpu", engine="numpy"))


def test_a_token_reads_every_weight_it_passes_and_what_is_cached() -> None:
    shape = shape_of(SMALL, dtype="float16")
    cached = 100 * 2 * 32 * 2 * 2  # tokens, keys and values, their elements, layers, bytes
    assert bytes_of(shape, 100, "float16") == 2 * (2 * LAYER + 1000 * 64 + 64) + cached
    untied = shape_of(SMALL | {"tie_word_embeddings": False}, dtype="float16")
    # A head of its own is read; of the embedding, one row is.
    assert bytes_of(untied, 100, "float16") == bytes_of(shape, 100, "float16")


def test_of_experts_only_those_are_read_that_are_chosen() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    shape = shape_of(SMALL | experts, dtype="float16")
    idle = 2 * 6 * 3 * 64 * 256  # layers, experts, matrices
    assert bytes_of(shape, 0, "float16") == 2 * (shape.parameters - 0 - idle)


def test_a_prompt_takes_two_operations_a_weight_and_token() -> None:
    shape = shape_of(SMALL, dtype="float16")
    scores = 2 * 2 * 2 * (100 * 100 // 2) * 64  # layers, products, additions, pairs, elements
    head = 1000 * 64
    assert operations_of(shape, 100) == 2 * (100 * (2 * LAYER + 64) + head) + scores


def test_speeds_are_those_of_real_runs(model: Any) -> None:
    told: list[tuple[int, int, str]] = []
    known = [
        Ceiling("cpu", "read", 1e11, "numpy", "sum"),
        Ceiling("cpu", "matmul", 1e12, "numpy", "matmul", "float32"),
    ]
    found = bench_text(
        model, [16, 200], written=8, repeats=1, ceilings=known,
        progress=lambda *step: told.append(step),
    )  # fmt: skip
    assert [each.context for each in found.speeds] == [16, 200]
    shape = model.plan.estimate.shape
    for each in found.speeds:
        assert each.prefill == pytest.approx(each.context / each.first_token)
        assert each.decode_limit == 1e11 / bytes_of(shape, each.context + 4, "float32")
        limit = 1e12 * each.context / operations_of(shape, each.context)
        assert each.prefill_limit == pytest.approx(limit)
        assert 0 < each.decode < each.decode_limit
        assert 0 < each.prefill < limit
    assert [done for done, _, _ in told] == [0, 1, 2, 3]
    assert found.peak is not None
    assert found.peak >= model.plan.estimate.weights
    lines = list(text_lines(found))
    assert any("read" in line and "B/s" in line for line in lines)
    assert lines[-2].split()[0] == "16"
    [unlimited] = bench_text(model, [16], written=8, repeats=1, ceilings=()).speeds
    assert (unlimited.decode_limit, unlimited.prefill_limit) == (None, None)


def test_prompts_have_as_many_tokens_as_texts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    steps = model.steps

    def recorded(prompts: Any, *rest: Any) -> Any:
        seen.extend(prompts)
        return steps(prompts, *rest)

    monkeypatch.setattr(model, "steps", recorded)
    bench_text(model, [16, 200], written=2, repeats=1, ceilings=())
    assert [len(set(prompt)) for prompt in seen] == [16, 16, 200, 200]


def test_a_prompt_that_leaves_no_room_is_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"500 tokens and a reply of 32 .* context of 512"):
        bench_text(model, [500])
    with pytest.raises(ConfigurationError, match="at least 2 tokens, not"):
        bench_text(model, [16], written=1)


def test_the_command(
    stories: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = measure.WorkloadSizes((2**16,), 2**16, (16,))
    monkeypatch.setattr(measure, "SIZES", dict.fromkeys(measure.SIZES, tiny))
    monkeypatch.setattr(language_models, "CEILING_LIMIT", 0.001)
    words = ["bench", "--llm", str(stories), "--device", "cpu", "--engine", "numpy"]
    assert main([*words, "--context", "16,32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["context"] for each in found["speeds"]] == [16, 32]
    assert (found["device"], found["engine"]) == ("cpu", "numpy")
    assert found["reason"] == "it was asked for"
    assert found["memory"]["weights"] == 1_040_160
    assert found["peak"] > 2**24  # at least this interpreter
    assert {each["what"] for each in found["ceilings"]} >= {"read", "matmul"}
    assert main([*words, "--context", "16"]) == 0
    out = capsys.readouterr().out
    assert "On cpu with numpy, because it was asked for." in out
    assert "tok/s" in out


def test_no_file_of_it_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "config.json"
    own.write_text("{}")
    assert main(["bench", "--llm", str(tmp_path), "--device", "cpu", "--json", str(own)]) == 2
    assert "this command reads" in capsys.readouterr().err
    assert own.read_text() == "{}"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--op", "matmul"], "--op is not for --llm"),
        (["--quick"], "--quick is not for --llm"),
        (["--engine", "numpy,torch"], "one --engine at a time"),
        (["--context", "0"], "not an integer above 0"),
        (["--context", "9k"], "512"),
        (["speeds.json"], "write --json speeds.json"),
    ],
)
def test_bad_input_ends_with_2(
    stories: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--llm", str(stories), "--device", "cpu", *more]) == 2
    assert said in capsys.readouterr().err
    assert main(["bench", "--context", "16"]) == 2
    assert "--context is for --llm" in capsys.readouterr().err
