"""`anydevice plan`: a table that fits the terminal, the same as JSON, and an exit code."""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from anydevice import testing
from anydevice._plan.estimates import estimate_inference
from anydevice._plan.plan import plan_inference
from anydevice._report.plan import plan_lines
from anydevice.cli import plan
from anydevice.cli.printing import Output
from tests.cli.conftest import Anydevice
from tests.plan.configs import LLAMA_8B, LLAMA_405B

SMALL = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "torch_dtype": "float32"}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
PARTS = {"weights", "kv_cache", "activations", "logits", "overhead", "total", "total_gib"}


@pytest.fixture
def large(tmp_path: Path) -> str:
    """The path of a config.json of 405 billion parameters."""
    return written(tmp_path, LLAMA_405B)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The path of a config.json of a model that fits anywhere."""
    return written(tmp_path, SMALL)


def written(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_what_fits_ends_with_0(anydevice: Anydevice, small: str) -> None:
    out = anydevice.text("plan", small, "--context", "128", cuda=1)
    assert "✓ fits on cuda:0" in out
    assert "kv-cache" in out
    assert "would fit" not in out


def test_a_missing_model(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    monkeypatch.setattr(plan, "look_ahead", lambda: looks.append("look"))
    for name in ("nobody/no-such-model", "no-such-folder/config.json"):
        code, out, err = anydevice("plan", name)
        assert (code, out, looks) == (2, "", [])
        assert f"{name}: there is no such file or folder" in err


def test_what_does_not_fit_ends_with_1(anydevice: Anydevice, large: str) -> None:
    with testing.fake_machine(cuda=8, memory="110GiB"):
        out = anydevice.text(
            "plan", large, "--context", "131072", "--batch", "8", "--device", "cuda", code=1
        )
    assert "✗ does not fit" in out
    assert "It would fit with:" in out
    assert "no place for" in out
    assert "cuda:7" in out


def test_on_several_devices_it_advises_fewer(anydevice: Anydevice, large: str) -> None:
    out = anydevice.text("plan", large, "--context", "131072", cuda=8, memory="190GiB")
    assert "together" in out
    assert "On fewer devices with:\n  context " in out
    assert "weights quantized to q8_0 instead of bfloat16" in out


def test_one_device_that_is_too_small(anydevice: Anydevice, large: str) -> None:
    out = anydevice.text("plan", large, "--device", "cuda:0", cuda=1, memory="80GiB", code=1)
    assert "✗ does not fit on cuda:0: 7" in out
    assert "GiB needed, 80.0 GiB free" in out
    assert re.search(r"^cuda:0  0–125 .* █+ 9\d\d %$", out, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("memory", ["1GiB", "130GiB", "180GiB", "2TiB"])
def test_every_line_fits_the_terminal(width: int, memory: str) -> None:
    with testing.fake_machine(cuda=8, memory=memory):
        made = plan_inference(LLAMA_405B, "cuda", context=8192, batch=4)
    lines = plan_lines(made, width)
    assert max(map(len, lines)) <= width
    bars = [line for line in lines if line.startswith("cuda:")]
    assert len(bars) == len(made.placements)
    assert all("█" in line or "░" in line for line in bars)


def test_a_stream_without_unicode_gets_bars_of_ascii(small: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with testing.fake_machine(cuda=1):
        made = plan_inference(small, context=128)
        Output(stream).say(*plan_lines(made, 60))
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "+ fits on cuda:0" in text
    assert "#" in text
    assert "?" not in text


def test_colours_only_mark(small: str) -> None:
    parsed: dict[str, Any] = {"model": small, "device": None, "context": 128, "batch": 1}
    shown = []
    for colour in (False, True):
        stream = io.StringIO()
        parser = argparse.ArgumentParser()
        plan.add_arguments(parser)
        arguments = parser.parse_args([small])
        vars(arguments).update(parsed, json=False)
        with testing.fake_machine(cuda=1):
            assert plan.run(arguments, Output(stream, colour=colour, width=60)) == 0
        shown.append(stream.getvalue())
    assert "\x1b" not in shown[0]
    assert "\x1b[32m✓\x1b[0m" in shown[1]
    plain = shown[1].replace("\x1b[32m", "").replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert plain == shown[0]


def test_as_json(anydevice: Anydevice, small: str) -> None:
    with testing.fake_machine(cuda=2):
        data = anydevice.json(
            "plan", small, "--context", "128", "--dtype", "float32", "--kv-dtype",
            "bfloat16", "--device", "cuda:1,cpu")  # fmt: skip
    assert set(data["estimate"]) >= PARTS
    expected = estimate_inference(SMALL, context=128, dtype="float32", kv_dtype="bfloat16")
    assert data["estimate"]["total"] == expected.total
    assert data["estimate"]["total_gib"] == pytest.approx(expected.total_gib, abs=0.01)
    assert (data["fits"], data["device"]) == (True, "cuda:1")


def refusal(anydevice: Anydevice, *words: str) -> str:
    """The error, the same for people and in JSON, of a plan that ends with 2."""
    err = anydevice.refusal("plan", *words, cuda=0)
    error: str = anydevice.json("plan", *words, cuda=0, code=2)["error"]
    assert error in err
    return error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody/nothing"], "to get it: hf download nobody/nothing (a plan"),
        (["/nowhere/config.json"], "no such file or folder"),
        (["MODEL", "--dtype", "bf16"], "did you mean 'bfloat16'"),
        (["MODEL", "--device", "cuda:9"], "cuda:9 is not usable"),
        (["MODEL", "--device", "gpux"], "no backend 'gpux'"),
        (["MODEL", "--context", "0"], "not an integer above 0"),
        (["MODEL", "--batch", "many"], "not an integer above 0"),
        ([], "MODEL"),
    ],
)
def test_bad_input_ends_with_2(anydevice: Anydevice, small: str, words: Any, said: str) -> None:
    words = [small if word == "MODEL" else word for word in words]
    assert said in refusal(anydevice, *words)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**SMALL, "model_type": "nimbus"}, "architecture 'nimbus' is not one of the"),
        ({"model_type": "llava", "text_config": SMALL}, "beside text_config it has parts"),
    ],
)
def test_uncountable(anydevice: Anydevice, tmp_path: Path, config: Any, said: str) -> None:
    path = written(tmp_path, config)
    error = refusal(anydevice, path)
    assert f"{path} cannot be counted: " in error
    assert said in error


@pytest.mark.parametrize(
    ("config", "title"),
    [
        (BERT, "110 M parameters in float32, context 512, batch 1"),
        (T5, "60.5 M parameters in bfloat16, context 4096, batch 1"),
        ({"model_type": "vit"}, "86.4 M parameters in bfloat16, context 197, batch 1"),
        ({**SMALL, "vocab_size": 7_811_033}, "1.00 B parameters in bfloat16, context"),
    ],
)
def test_the_title(anydevice: Anydevice, tmp_path: Path, config: Any, title: str) -> None:
    path = written(tmp_path, config)
    out = anydevice.text("plan", path, cuda=1, memory="80GiB")
    assert f"{tmp_path.name}: {title}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "context"),
    [("8k", 8192), ("32k", 32768), ("128K", 131072), ("1m", 2**20), ("1.5k", 1536), ("4096", 4096)],
)
def test_a_context_in_words(anydevice: Anydevice, small: str, words: str, context: int) -> None:
    code, out, _ = anydevice("plan", small, "--json", "--context", words, cuda=1)
    assert (code, json.loads(out)["estimate"]["context"]) == (0, context)


def test_a_training_on_cards_that_are_not_here(anydevice: Anydevice, large: str) -> None:
    eight = written(Path(large).parent, LLAMA_8B)
    out = anydevice.text(
        "plan", eight, "--train", "--on", "16xH100-80GB", "--tokens", "2T", "--context", "8192"
    )
    assert "✓ fits on 16xH100-80GB" in out
    assert "tokens a second ± 15 %" in out
    assert "2.00 T tokens: " in out
    for part in ("weights", "gradients", "optimizer", "activations", "communication", "overhead"):
        assert re.search(rf"^  {part} +[\d.]+ .iB$", out, re.MULTILINE), part


def test_a_training_that_does_not_fit_ends_with_1(anydevice: Anydevice, large: str) -> None:
    data = anydevice.json("plan", large, "--train", "--on", "16xH100-80GB", code=1)
    assert (data["fits"], data["tokens_per_second"]) == (False, None)
    assert data["enough"] is None
    assert data["memory"]["total"] > data["free"]
    code, out, _ = anydevice("plan", large, "--train", "--on", "16xH100-80GB")
    assert (code, "more such cards would not do either" in " ".join(out.split())) == (1, True)
    code, out, _ = anydevice("plan", large, "--train", "--on", "16xB200", "--json")
    assert (code, json.loads(out)["enough"]) == (1, "72xB200-180GB")


def test_inference_on_cards_that_are_not_here(anydevice: Anydevice, large: str) -> None:
    with testing.fake_machine():
        assert anydevice("plan", large, "--on", "2xH100")[0] == 1
        data = anydevice.json("plan", large, "--on", "4x8xA100-80GB")
    assert 10 <= len(data["placements"]) <= 32
    assert data["placements"][0]["free"] == int(79.1 * 2**30)
    assert "32xA100-80GB" in data["notes"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--train",), "add --on"),
        (("--on", "2xQ7"), "write its memory too: '2xQ7-48GB'"),
        (("--on", "12xH100", "--train"), "say how many a node has"),
        (("--on", "2xH100", "--device", "cpu"), "either --on or --device"),
        (("--on", "2xH100", "--tokens", "2T"), "add --train"),
        (("--on", "2xH100", "--train", "--dtype", "int4"), "--dtype is not for --train"),
        (("--on", "2xH100", "--train", "--tokens", "many"), "such as 2e12 or '2T'"),
        (("--on", "2xH100", "--train", "--strategy", "magic"), "replicate, shard_gradients, shard"),
    ],
)
def test_wrong_options(anydevice: Anydevice, small: str, words: tuple[str, ...], said: str) -> None:
    assert said in " ".join(anydevice.refusal("plan", small, *words).split())
