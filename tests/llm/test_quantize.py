"""Models quantized: GGUF files that are written, and weights quantized while they are loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from anydevice import device, llm
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.trees import leaves
from anydevice._formats.gguf import read_gguf
from anydevice._formats.gguf_writer import FILE_TYPES, NewTensor, choose_kind
from anydevice._formats.quantized import dequantize
from anydevice._llm.description import describe
from anydevice._llm.tokenizer import SPLITTINGS, Tokenizer
from anydevice._plan.config import read_config
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError, VerificationError
from tests.comparing import assert_close
from tests.programs import run_python

gguf = pytest.importorskip("gguf")
from tests.llm.families import LLAMA3, LONG  # noqa: E402
from tests.llm.random_weights import load_parameters  # noqa: E402
from tests.llm.test_gguf import FAMILIES, LINES, byte_level, made, tokenizer_file  # noqa: E402
from tests.llm.tokenizer_files import pairs  # noqa: E402

CPU = device("cpu", engine="numpy")
other_rows = pytest.mark.filterwarnings("ignore:some rows are not whole blocks")
PROMPT = "Once upon a time"
LETTERS = [chr(code) for code in range(0x21, 0x21 + 91)]


def with_tokenizer(folder: Path, vocabulary: int = 97) -> Path:
    """Add a tokenizer of single characters."""
    tokens = ["<unk>", "<s>", "</s>", *LETTERS]
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    special = [{"id": n, "content": t, "special": True} for n, t in enumerate(tokens[:3])]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    values = {"version": "1.0", "model": pairs(tokens[:vocabulary]), "pre_tokenizer": step}
    values |= {"added_tokens": [row | flags for row in special], "normalizer": None}
    values |= {"post_processor": None, "decoder": step, "truncation": None, "padding": None}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A random model of Llama's family, whose rows are not whole blocks of 256."""
    return with_tokenizer(made(tmp_path, "llama")[0])


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, "mistral"])
def test_a_file_has_the_model_of_the_folder(tmp_path: Path, name: str) -> None:
    """Its config, the names and the order of its tensors, and each number in 16 bits."""
    if name == "mistral":
        folder = made(tmp_path, "llama")[0]
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "mistral", "sliding_window": None}
        (folder / "config.json").write_text(json.dumps(config | {"architectures": None}))
    else:
        folder = made(tmp_path, name)[0]
    file = llm.quantize(with_tokenizer(folder), tmp_path / "f16.gguf", "f16").path
    description = describe(read_config(folder))
    assert describe(read_config(file)).layers == description.layers
    first, second = (load_parameters(x, description, CPU, "float32") for x in (folder, file))
    for a, b in zip(leaves(first), leaves(second), strict=True):
        assert_close(a, b, terms=2, dtype="float16")


@pytest.mark.parametrize("scaling", [LLAMA3, LONG], ids=["llama3", "longrope"])
def test_scaled_positions_are_in_the_file(tmp_path: Path, scaling: dict[str, Any]) -> None:
    folder = with_tokenizer(made(tmp_path, "phi3" if scaling is LONG else "llama")[0])
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    original = {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config |= {"rope_scaling": scaling | original, "rope_theta": 500000.0}
    config |= {"original_max_position_embeddings": 16} if scaling is LONG else {}
    (folder / "config.json").write_text(json.dumps(config))
    file = read_gguf(llm.quantize(folder, tmp_path / "new.gguf", "q8_0").path)
    table = file.tensors["rope_factors_long.weight" if scaling is LONG else "rope_freqs.weight"]
    assert table.shape == (4,)
    rope, expected = (describe(read_config(x)).layers[0].rope for x in (file.path, folder))
    assert rope is not None
    assert expected is not None
    assert dict(rope.scaling)["rope_type"] == dict(expected.scaling)["rope_type"]


def test_a_written_file_continues_as_the_folder_does(stories: Path, tmp_path: Path) -> None:
    expected = llm.load(stories, CPU).generate(PROMPT, 40).text
    for scheme, same in (("f16", 40), ("q8_0", 40), ("q4_1", 8)):
        file = llm.quantize(stories, tmp_path / f"{scheme}.gguf", scheme)
        assert file.nbytes == file.path.stat().st_size
        model = llm.load(file.path, CPU)
        assert model.tokenizer.eos_ids == llm.load(stories, CPU).tokenizer.eos_ids
        assert expected.startswith(model.generate(PROMPT, same).text)
    kinds = {tensor.name: tensor.packing.name for tensor in read_gguf(file.path).tensors.values()}
    assert kinds["token_embd.weight"] == "Q8_0"  # it is the head, too
    assert kinds["blk.0.attn_q.weight"] == "Q4_1"
    assert kinds["blk.0.ffn_down.weight"] == "F16"  # rows of 172 numbers
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert file.kinds == {"Q8_0": 1, "Q4_1": 30, "F16": 5, "F32": 11}


def test_the_file_is_what_the_package_reads(stories: Path, tmp_path: Path) -> None:
    file = llm.quantize(stories, tmp_path / "x.gguf", "q8_0")
    reader = gguf.GGUFReader(file.path)
    fields = {name: reader.get_field(name).contents() for name in reader.fields}
    assert fields["general.architecture"] == "llama"
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert fields["llama.block_count"] == 5
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    assert all(tensor.data_offset % 32 == 0 for tensor in reader.tensors)
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    exact = load_file(stories / "model.safetensors")["model.embed_tokens.weight"]
    error = np.abs(gguf.quants.dequantize(embedding.data, embedding.tensor_type) - exact)
    assert error.max() <= np.abs(exact).max() / 127 * 0.51


def test_a_file_is_quantized_again(stories: Path, tmp_path: Path) -> None:
    """Metadata stays as its bytes are, types included."""
    first = llm.quantize(stories, tmp_path / "f16.gguf", "f16").path
    second = llm.quantize(first, tmp_path / "q8_0.gguf", "q8_0").path
    direct = llm.quantize(stories, tmp_path / "direct.gguf", "q8_0").path
    texts = [llm.load(path, CPU).generate(PROMPT, 30).text for path in (second, direct)]
    assert texts[0] == texts[1]
    one, other = (gguf.GGUFReader(path).fields for path in (first, second))
    assert [*other] == [*one, "general.quantization_version"]
    for name in {*one} - {"general.file_type", "GGUF.kv_count"}:
        assert one[name].types == other[name].types
        assert one[name].contents() == other[name].contents()


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_byte_level_tokenizers_survive(tmp_path: Path, pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(read_gguf(tokenizer_file(tmp_path, byte_level(pre))))
    folder = made(tmp_path, "llama")[0]
    (folder / "tokenizer.json").write_text(tokenizer._backend.to_str())
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    grow_vocabulary(folder, 450)
    file = read_gguf(llm.quantize(folder, tmp_path / "new.gguf", "q8_0").path)
    written = Tokenizer.from_gguf(file)
    assert SPLITTINGS[file.metadata["tokenizer.ggml.pre"]].digits == SPLITTINGS[pre].digits
    assert [written.encode(line) for line in LINES] == [tokenizer.encode(line) for line in LINES]
    assert (written.bos_id, written.ends) == (0, (1, 2))
    assert written.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 450


def grow_vocabulary(folder: Path, size: int) -> None:
    """Give a tiny model more tokens."""
    state = load_file(folder / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & {*state}:
        state[name] = np.resize(state[name], (size, state[name].shape[1]))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))


# --- mixtures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [5, 22, 28, 32])
def test_mixtures_are_those_of_llama_cpp(layers: int) -> None:
    """More bits for the head, and for values and outputs of some layers: `use_more_bits` there."""

    def kind(name: str, scheme: str, experts: int = 0, tied: bool = False, rows: int = 512) -> str:
        return choose_kind(NewTensor(name, (64, rows)), scheme, layers, experts, tied)

    fine = [
        n
        for n in range(layers)
        if n < layers // 8 or n >= 7 * layers // 8 or (n - layers // 8) % 3 == 2
    ]
    for scheme, plain in (("q4_k_m", "Q4_K"), ("q5_k_m", "Q5_K")):
        for part in ("attn_v", "ffn_down"):
            more = [n for n in range(layers) if kind(f"blk.{n}.{part}.weight", scheme) == "Q6_K"]
            assert more == fine
            assert kind(f"blk.{layers // 8}.{part}.weight", scheme) == plain
        assert kind("blk.0.attn_q.weight", scheme) == plain
        assert kind("token_embd.weight", scheme) == plain
        assert kind("token_embd.weight", scheme, tied=True) == kind("output.weight", scheme)
    assert kind("output.weight", "q4_0") == "Q6_K"
    assert kind("output.weight", "q4_0", rows=96) == kind("output.weight", "q8_0") == "Q8_0"
    assert kind("blk.0.attn_qkv.weight", "q4_k_m") == "Q5_K"
    assert kind("blk.0.attn_qkv.weight", "q5_k_m") == "Q6_K"
    assert kind("blk.0.attn_k.weight", "q4_k_m", experts=8) == "Q8_0"
    assert kind("blk.0.attn_output.weight", "q4_k_m", experts=8) == "Q5_K"
    assert kind("blk.0.ffn_gate_inp.weight", "q4_0") == kind("blk.0.x_norm.bias", "q4_0") == "F32"
    assert kind("blk.0.ffn_up.weight", "q4_k_m", rows=96) == "Q5_0"
    assert kind("blk.0.ffn_up.weight", "q6_k", rows=172) == "F16"


# --- loading --------------------------------------------------------------------------------------


@other_rows
@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx"])
@pytest.mark.parametrize("scheme", ["q8_0", "fp8"])
def test_weights_are_quantized_while_loading(stories: Path, scheme: str, engine: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine))
    text = (stories / "golden.txt").read_text()
    exact = llm.load(stories, CPU)
    model = llm.load(stories, device("cpu", engine=engine), weights=scheme)
    layer, before = model.parameters["layers"][1], exact.parameters["layers"][1]
    assert isinstance(layer["qkv"]["weight"], QuantizedWeight)
    assert layer["qkv"]["weight"].scheme == scheme
    assert not isinstance(layer["attention_norm"]["weight"], QuantizedWeight)
    if engine == "numpy":
        error = np.abs(dequantize(layer["qkv"]["weight"]) - before["qkv"]["weight"])
        steps = 127 if scheme == "q8_0" else 30
        assert error.max() < np.abs(before["qkv"]["weight"]).max() / steps
    price = model.score(text).perplexity / exact.score(text).perplexity
    assert 0.98 < price < (1.01 if scheme == "q8_0" else 1.03)


@other_rows
def test_a_file_of_floats_is_quantized_as_the_folder_is(stories: Path, tmp_path: Path) -> None:
    """Rows of queries and keys are in another order there."""
    text = (stories / "golden.txt").read_text()
    file = llm.quantize(stories, tmp_path / "f16.gguf", "f16").path
    one, other = (llm.load(path, CPU, weights="q4_0") for path in (stories, file))
    for path in (file, stories):
        reply = llm.load(path, CPU, weights="q8_0").generate(PROMPT, 30)
        assert reply.text.startswith(", there was a little girl named Lily.")
    assert one.parameters["layers"][0]["qkv"]["weight"].scheme == "q4_0"
    assert abs(one.score(text).perplexity / other.score(text).perplexity - 1) < 0.02


@other_rows
def test_a_norm_that_is_not_finite_is_named_beside_quantized_weights(stories: Path) -> None:
    model = llm.load(stories, CPU, weights="q4_0")
    model.parameters["norm"]["weight"][3] = np.nan
    with pytest.raises(VerificationError, match=r"the weight norm\.weight has such numbers"):
        model.generate(PROMPT, 3)


def test_other_rows_are_said_once(stories: Path) -> None:
    with pytest.warns(UserWarning, match="172 numbers.*floating point") as caught:
        model = llm.load(stories, CPU, weights="q4_k")
    assert len(caught) == 1
    layer = model.parameters["layers"][0]
    assert layer["qkv"]["weight"].scheme == "q5_0"
    assert layer["down"]["weight"].dtype == np.float32
    assert model.parameters["embedding"].scheme == "q8_0"  # it is the head, too


# --- what is refused ------------------------------------------------------------------------------


@other_rows
def test_damaged_weights_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    state = load_file(tiny / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    save_file(state, tiny / "model.safetensors", {"format": "pt"})
    name = r"model\.layers\.1\.mlp\.down_proj\.weight.*NaN"
    with pytest.raises(TransferError, match=name):
        llm.quantize(tiny, tmp_path / "x.gguf", "q4_0")
    with pytest.raises(TransferError, match=name):
        llm.load(tiny, CPU, weights="q8_0")
    assert not [*tmp_path.glob("*x.gguf*")]


def test_unknown_schemes_list_the_known_ones(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'q4_k_xl'.*q4_k_m"):
        llm.quantize(tiny, tmp_path / "x.gguf", "q4_k_xl")
    with pytest.raises(ConfigurationError, match=r"stored.*q4_k.*fp8.*q9"):
        llm.load(tiny, CPU, weights="q9")


def test_an_existing_file_stays_unless_forced(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigurationError, match=r"x\.gguf exists.*--force"):
        llm.quantize(tiny, path, "q8_0")
    assert path.read_bytes() == b"mine"
    assert llm.quantize(tiny, path, "q8_0", force=True).path == path
    again = llm.quantize(path, path, "f16", force=True)  # the file that is read, too
    assert read_gguf(path).metadata["general.file_type"] == FILE_TYPES["f16"].number
    assert again.kinds["F16"] > 0


def test_places_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="no folder"):
        llm.quantize(tiny, tmp_path / "nowhere" / "x.gguf", "q8_0")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(TransferError, match=r"folder\.gguf cannot be written"):
        llm.quantize(tiny, tmp_path / "folder.gguf", "q8_0", force=True)


def test_a_full_disk_is_said_before_anything_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 5000})
    monkeypatch.setattr("anydevice._llm.quantize.shutil.disk_usage", lambda path: usage)
    with pytest.raises(TransferError, match=r"x\.gguf cannot be written.*4\.9 KiB are free"):
        llm.quantize(tiny, tmp_path / "x.gguf", "q8_0")
    assert not [*tmp_path.glob("*x.gguf*")]


LIMITED = """
import resource, signal, sys
from anydevice._llm import quantize as module
from anydevice.errors import TransferError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
write = module.write_gguf
def limited(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    write(*arguments)
module.write_gguf = limited
try:
    module.quantize(sys.argv[1], sys.argv[2], "f16")
except TransferError as error:
    print(error)
"""


def test_a_disk_that_fills_up_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="the size of files is limited as on POSIX")
    place = tmp_path / "place"
    place.mkdir()
    done = run_python("-c", LIMITED, str(tiny), str(place / "x.gguf"))
    assert "x.gguf cannot be written: File too large" in done.stdout, done.stderr
    assert [*place.iterdir()] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "olmo3"}, "family olmo3 are not written"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "layer 0"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding_window = 16 of llama"),
        ({"vocab_size": 40}, "tokens, and the model only 40"),
    ],
    ids=str,
)
def test_what_gguf_cannot_say_is_refused(
    tiny: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config.pop("rope_parameters")
    config |= {"rope_theta": 10000.0, "architectures": None, **change}
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises((UnsupportedError, ConfigurationError), match=message):
        llm.quantize(tiny, tmp_path / "x.gguf", "q8_0")
    assert not (tmp_path / "x.gguf").exists()


def test_tokenizers_of_other_kinds_are_refused(tiny: Path, tmp_path: Path) -> None:
    values = json.loads((tiny / "tokenizer.json").read_text())
    step = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}
    for change in (
        {"pre_tokenizer": step},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    ):
        (tiny / "tokenizer.json").write_text(json.dumps(values | change))
        with pytest.raises(UnsupportedError, match="tokenizer"):
            llm.quantize(tiny, tmp_path / "x.gguf", "q8_0")


# --- interrupted -------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=str)
def test_a_write_that_is_ended_half_way_leaves_no_file(
    tiny: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """After Ctrl-C nothing is left, and what a killed writer leaves goes with the next write."""
    grow_vocabulary(tiny, 600_000)
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-m", "anydevice", "quantize", str(tiny), str(place / "x.gguf")]
    writer = subprocess.Popen([*command, "--type", "q4_0"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not any(file.stat().st_size > 10**6 for file in place.iterdir()):
        assert writer.poll() is None, writer.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.send_signal(number)
    writer.communicate(timeout=60)
    assert writer.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    left = [file.name for file in place.iterdir()]
    assert len(left) == (number == signal.SIGKILL)
    grow_vocabulary(tiny, 1000)
    llm.quantize(tiny, place / "x.gguf", "q4_0")
    assert [file.name for file in place.iterdir()] == ["x.gguf"]


# --- beside llama.cpp ---------------------------------------------------------------------------


def llama_cpp(file: Path) -> Any:
    """The completions of llama.cpp from a file, with one thread."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp (xllamacpp) is not installed")
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(file), 256, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(options)
    return lambda **more: server.handle_completions({"temperature": 0, **more})["choices"][0]


def continued(file: Path, prompt: str, tokens: int) -> str:
    """The text with which llama.cpp continues a prompt greedily."""
    reply = llama_cpp(file)(prompt=prompt, n_predict=tokens, cache_prompt=False)
    text: str = reply["text"]
    return text


def perplexity_of_llama_cpp(file: Path, ids: list[int], vocabulary: int) -> float:
    """The perplexity of tokens: each is looked up among the probabilities of all."""
    complete, logprobs = llama_cpp(file), []
    for end in range(1, len(ids)):
        reply = complete(prompt=ids[:end], n_predict=1, cache_prompt=True, logprobs=vocabulary)
        top = reply["logprobs"]["content"][0]["top_logprobs"]
        logprobs.append(next(row["logprob"] for row in top if row["id"] == ids[end]))
    return float(np.exp(-np.mean(logprobs)))


@pytest.mark.parametrize("scheme", ["f16", "q8_0", "q5_0", "q4_1", "q4_0", "q4_k_m"])
def test_the_perplexity_is_llama_cpps(stories: Path, tmp_path: Path, scheme: str) -> None:
    file = llm.quantize(stories, tmp_path / "x.gguf", scheme).path
    model = llm.load(file, CPU, activations="exact")
    ids = model.tokenizer.encode(" ".join(LINES))[:100]
    theirs = perplexity_of_llama_cpp(file, ids, model.description.vocabulary)
    assert abs(model.score(ids).perplexity / theirs - 1) < 0.01


@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["f16", "q8_0", "q5_0", "q4_1"])
def test_llama_cpp_continues_a_written_file(stories: Path, tmp_path: Path, scheme: str) -> None:
    file = llm.quantize(stories, tmp_path / "x.gguf", scheme).path
    own = llm.load(file, CPU).generate(PROMPT, 30).text
    assert continued(file, PROMPT, 30)[:60] == own[:60]


@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["q4_k_m", "q6_k", "q4_0"])
def test_a_real_model_is_quantized_again(smollm2: Path, tmp_path: Path, scheme: str) -> None:
    file = llm.quantize(smollm2, tmp_path / "x.gguf", scheme).path
    text = "The capital of France is a city that"
    own = llm.load(file, CPU).generate(text, 12).text
    assert continued(file, text, 12)[:20] == own[:20]
    ids = llm.load(smollm2, CPU).tokenizer.encode("\n".join(LINES))
    price = llm.load(file, CPU).score(ids).perplexity / llm.load(smollm2, CPU).score(ids).perplexity
    assert 0.9 < price < 1.12
