"""`anydevice chat`: one prompt of a script, and a conversation on a real terminal."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from anydevice import device, llm, plan_inference
from anydevice.cli.chat import described
from anydevice.cli.main import main
from tests.cli.conftest import Anydevice, Process
from tests.cli.pseudo_terminal import PATIENCE, Terminal, TerminalStream
from tests.llm.conftest import data
from tests.machines import machine_of

Chatting = Callable[..., Terminal]
GgufFile = Callable[..., Path]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}. {% endfor %}"
HERE = ("--device", "cpu", "--engine", "numpy")
SMOLLM2 = ".cache/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LONG = 3000
"""Tokens that take seconds: long enough to be interrupted."""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are for POSIX")


@pytest.fixture(scope="session")
def stories() -> Path:
    """A model that completes text: it has no chat template."""
    pytest.importorskip("tokenizers", reason="tokenizers are not installed")
    return data("stories260K")


@pytest.fixture(scope="session")
def talker(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template, and a context in which it can talk for seconds."""
    folder = tmp_path_factory.mktemp("models") / "talker"
    copytree(stories, folder, copy_function=lambda a, b: Path(b).write_bytes(Path(a).read_bytes()))
    folder.chmod(0o755)
    for name, changes in (
        ("config.json", {"max_position_embeddings": 2 * LONG}),
        ("generation_config.json", {"eos_token_id": 2}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | changes))
    return folder


@pytest.fixture(scope="session")
def model(talker: Path) -> Any:
    """What the command ought to give."""
    return llm.load(talker, device("cpu", engine="numpy"))


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="session")
def gguf_file(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """The talker as a GGUF file, with more values in it; what reads text lies beside it."""
    pytest.importorskip("gguf")
    from safetensors.numpy import load_file

    from tests.llm.gguf_files import write

    numbers = {"context_length": 20_000, "block_count": 5, "embedding_length": 64}
    numbers |= {"feed_forward_length": 172, "attention.head_count": 8, "attention.head_count_kv": 4}
    more = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 8}

    def made(**values: Any) -> Path:
        folder = tmp_path_factory.mktemp("gguf")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / name).write_bytes((talker / name).read_bytes())
        state = load_file(talker / "model.safetensors")
        named = {f"general.sampling.{name}": value for name, value in values.items()}
        file = folder / "talker.gguf"
        return write(file, "llama", state, {**numbers, **more}, heads=(8, 4), tokenizer=named)

    return made


def test_weights_of_nan_are_said(anydevice: Anydevice, talker: Path, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "damaged"
    copytree(talker, folder)
    state = load_file(folder / "model.safetensors")
    state["model.layers.3.mlp.down_proj.weight"][5, 7] = np.nan
    save_file(state, folder / "model.safetensors")
    for more in ([], ["--json"], ["--temperature", "1"]):
        code, out, err = anydevice("chat", str(folder), *HERE, "--prompt", "Hi", *more)
        assert code == 2
        assert "token 1 of the reply are NaN or infinite" in out + err
        assert "layers[3].down.weight" in out + err


def test_plan_and_chat_of_a_gguf_file(anydevice: Anydevice, gguf_file: GgufFile) -> None:
    file = str(gguf_file())
    for more in ([], ["--context", "500"], ["--dtype", "bfloat16"]):
        words = [file, "--device", "cpu", "--json", *more]
        out = anydevice.text("plan", *words)
        plan = json.loads(out)["estimate"]
        out = anydevice.text("chat", *words, "--prompt", "Hi", "--max-tokens", "1")
        chat = json.loads(out)
        assert (plan["context"], plan["dtype"]) == (chat["context"], chat["dtype"])
        assert {name: plan[name] for name in chat["memory"]} == chat["memory"]
        if not more:
            assert (plan["context"], plan["dtype"]) == (8192, "float32")


def test_one_gguf_file(anydevice: Anydevice, gguf_file: GgufFile, tmp_path: Path) -> None:
    """A folder or a repository of one GGUF file is that file."""
    file = gguf_file()
    commit = tmp_path / "hub" / "models--org--tiny-GGUF" / "snapshots" / "0123"
    commit.mkdir(parents=True)
    for each in file.parent.iterdir():
        (commit / each.name).symlink_to(each)
    words = ("--prompt", "Hi", "--max-tokens", "4", "--temperature", "0", "--json")
    wanted = json.loads(anydevice("chat", str(file), *HERE, *words)[1])
    weights = plan_inference(file, "cpu").estimate.weights
    for name in (str(file.parent), "org/tiny-GGUF"):
        code, out, err = anydevice("chat", name, *HERE, *words)
        assert (code, json.loads(out)["tokens"]) == (0, wanted["tokens"]), err
        code, out, err = anydevice("plan", name, "--device", "cpu", "--json")
        assert (code, json.loads(out)["estimate"]["weights"]) == (0, wanted["memory"]["weights"])
        assert plan_inference(name, "cpu").estimate.weights == weights
        assert llm.load(name, device("cpu", engine="numpy")).name == "talker.gguf"
    (commit / "other.gguf").symlink_to(file)
    for command in (["chat", "--prompt", "x"], ["plan"], ["bench", "--llm"]):
        code, out, err = anydevice(*command, "org/tiny-GGUF")
        assert (code, "(other.gguf, talker.gguf); give the path" in err) == (2, True), err


def test_sampling_defaults(anydevice: Anydevice, gguf_file: GgufFile, model: Any) -> None:
    def tokens(file: Path, *more: str) -> list[int]:
        words = (*HERE, "--json", "--prompt", "Hello there", "--max-tokens", "20", *more)
        out = anydevice.text("chat", str(file), *words)
        return list(json.loads(out)["tokens"])

    def expected(**options: Any) -> list[int]:
        return list(model.generate([said("Hello there")], 20, **options).tokens)

    usual = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    silent, loud = gguf_file(), gguf_file(temp=1.5, top_k=7, penalty_repeat=1.25)
    assert tokens(silent, "--seed", "4") == expected(**usual, seed=4)
    assert tokens(silent, "--temperature", "0") == expected() != expected(**usual, seed=4)
    asked = {"temperature": 1.5, "top_k": 7, "repetition_penalty": 1.25}
    assert tokens(loud, "--seed", "4") == expected(**asked, seed=4)
    assert tokens(loud, "--seed", "4", "--top-k", "3") == expected(**asked | {"top_k": 3}, seed=4)


def test_a_script_gets_the_text_and_remarks_apart(process: Process, stories: Path) -> None:
    run = process("chat", str(stories), *HERE, "--prompt", "Once upon a time", "--max-tokens", "24")
    assert run.returncode == 0, run.stderr
    alone = llm.load(stories, device("cpu", engine="numpy"))
    assert run.stdout.decode() == f"{alone.generate('Once upon a time', 24).text}\n"
    told = run.stderr.decode()
    assert "stories260K: 260,032 parameters in float32, a context of 512 tokens" in told
    assert "On cpu with numpy, because it was asked for." in told
    assert re.search(r"Memory: .* MiB, of which weights 1015.8 KiB, kv-cache", told)
    assert "no chat template" in told
    assert re.search(r"\[24 tokens, [\d.]+ tokens/s, the first after .*, cut off at", told)


def test_the_prompt_comes_through_a_pipe(stories: Path) -> None:
    words = ["chat", str(stories), *HERE, "--max-tokens", "5", "--json"]
    texts = []
    for more, given in (([], b"The dog\n"), (["--prompt", "-"], b"\xef\xbb\xbfThe dog\r\n")):
        ended = subprocess.run(
            [sys.executable, "-m", "anydevice", *words, *more],
            input=given,
            capture_output=True,
            timeout=400,
        )
        assert ended.returncode == 0, ended.stderr
        texts.append(json.loads(ended.stdout)["text"])
    alone = llm.load(stories, device("cpu", engine="numpy")).generate("The dog", 5)
    assert texts == [alone.text, alone.text]


def test_as_json(anydevice: Anydevice, talker: Path, model: Any) -> None:
    found = anydevice.json(
        "chat", str(talker), *HERE, "--prompt", "Who are you?", "--max-tokens", "9",
        "--system", "Be brief", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "40",
        "--min-p", "0.01", "--seed", "3", "--stop", "zzz", "--stop", "yyy",
    )  # fmt: skip
    wanted = model.generate(
        [{"role": "system", "content": "Be brief"}, said("Who are you?")], 9, temperature=0.8,
        top_p=0.9, top_k=40, min_p=0.01, seed=3, stop=["zzz", "yyy"],
    )  # fmt: skip
    assert (found["text"], found["tokens"]) == (wanted.text, list(wanted.tokens))
    assert found["ended"] == "length"
    assert (found["device"], found["engine"]) == ("cpu", "numpy")
    assert found["reason"] == "it was asked for"
    assert found["speed"]["decode"] > 0
    assert found["speed"]["prompt_tokens"] == wanted.speed.prompt_tokens
    assert found["memory"]["weights"] == 1_040_160
    assert found["memory"]["total"] >= found["memory"]["weights"] + found["memory"]["kv_cache"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "--prompt", ""], "the prompt is empty"),
        (["nobody/nothing", "--prompt", "x"], "no such model in the Hugging Face cache"),
        (["nosuchmodel"], "no such model in the Hugging Face cache"),
        (["MODEL", "--prompt", "x", "--device", "cuda:9"], "no usable device matches 'cuda:9'"),
        (["MODEL", "--prompt", "x", "--dtype", "int3"], "int3"),
        (["MODEL", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["MODEL", "--prompt", "x", "--system", "y"], "has no chat template"),
        (["MODEL", "--prompt", "x", "--max-tokens", "0"], "not an integer above 0"),
        (["MODEL", "--prompt", "word " * 600], "512"),
        (["MODEL", "--prompt", "x", "--top-k", "many"], "invalid int value"),
    ],
)
def test_bad_input_ends_with_2(
    anydevice: Anydevice, stories: Path, words: list[str], message: str
) -> None:
    words = [str(stories) if word == "MODEL" else word for word in words]
    assert message in anydevice.refusal("chat", *words, cuda=0)
    assert message in anydevice.json("chat", *words, cuda=0, code=2)["error"]


@pytest.mark.parametrize(
    ("option", "value", "message"), [("--top-p", "2", "top_p"), ("--stop", "", "a stop string")]
)
def test_wrong_options_are_said_before_a_model_is_loaded(
    option: str, value: str, message: str, anydevice: Anydevice, stories: Path
) -> None:
    err = anydevice.refusal("chat", str(stories), *HERE, "--prompt", "x", option, value)
    assert message in err
    assert "parameters" not in err


def test_a_model_that_does_not_fit_ends_with_1(anydevice: Anydevice, stories: Path) -> None:
    with machine_of(cuda=1, memory="64KiB", engines=("numpy",)):
        code, _, err = anydevice("chat", str(stories), "--prompt", "x", "--device", "cuda")
    assert code == 1
    assert "does not fit" in err


def test_no_prompt(anydevice: Anydevice, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TerminalStream())
    assert "--json is for one reply" in anydevice.json("chat", str(stories), code=2)["error"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    assert "standard input is not UTF-8" in anydevice.refusal("chat", str(stories))
    monkeypatch.setattr(sys, "stdin", None)
    assert anydevice("chat", str(stories))[0] == 2


def test_a_hub_name(anydevice: Anydevice, stories: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "hub" / "models--karpathy--stories260K" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "0123").symlink_to(stories)
    words = ("--prompt", "Once", "--max-tokens", "2")
    code, out, _ = anydevice("chat", "karpathy/stories260K", *HERE, *words)
    assert (code, out.strip() != "") == (0, True)
    assert llm.load("karpathy/stories260K", "cpu").name == "karpathy/stories260K"


@pytest.mark.needs("torch")
def test_numpy_serves_small_models_on_a_cpu(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.load(stories, "cpu").device.engine == "numpy"
    monkeypatch.setattr("anydevice._llm.model.SMALL", 2**20 - 2**16)
    assert llm.load(stories, device("cpu", engine="numpy")).device.engine == "numpy"
    for fast, serves in (("torch", "torch"), ("cupy", "numpy")):
        monkeypatch.setattr("anydevice._llm.model.CPU_ENGINES", (fast,))
        found = llm.load(stories, "cpu").device
        assert (found.engine, found.engine_is_free) == (serves, True)


def test_a_reader_that_leaves_is_no_error(talker: Path) -> None:
    command = [sys.executable, "-m", "anydevice", "chat", str(talker), *HERE]
    with subprocess.Popen(
        [*command, "--prompt", "Once upon a time", "--max-tokens", str(LONG)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(3)
        process.stdout.close()
        assert process.wait(PATIENCE) == 141


BUSY = """
import hashlib, sys
from anydevice.cli.main import main
from anydevice._llm.generate import DecoderExecutor

def passed(*arguments, **options):
    print("busy", file=sys.stderr, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # in C for minutes, as a compiler is

DecoderExecutor.forward = passed
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_ctrl_c_ends_a_script_while_a_library_is_at_work(talker: Path, more: list[str]) -> None:
    words = ["chat", str(talker), *HERE, "--prompt", "Hi", *more]
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        try:
            while b"busy" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 130
        finally:
            process.kill()
        assert process.stdout.read() == b""


def test_a_stream_without_unicode(process: Process, talker: Path) -> None:
    words = ("chat", str(talker), *HERE, "--prompt", "naïve “dog”", "--max-tokens", "5")
    ended = process(*words, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C.UTF-8")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.decode("ascii")


# --- on a terminal ------------------------------------------------------------------------------


@pytest.fixture
def chatting(talker: Path) -> Iterator[Chatting]:
    opened: list[Terminal] = []

    def open_one(*words: str, folder: Path = talker, **changes: Any) -> Terminal:
        opened.append(Terminal("chat", str(folder), *HERE, *words, **changes))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def plain(shown: str) -> str:
    """What a person sees: without styles, and with the line ends of a file."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n").replace("\r", "")


def turn(terminal: Terminal, text: str) -> tuple[str, str]:
    """Type a line; what was replied, and what was said of it."""
    terminal.type(text.encode() + b"\n")
    shown = plain(terminal.until(r"\[\d+ tokens?, [^\]]*\][^>]*> "))
    _, _, rest = shown.partition(f"{text}\n")
    reply, _, note = rest.rpartition("\n[")
    return reply, note


def leave(terminal: Terminal, keys: bytes = b"/exit\n") -> None:
    """End the conversation."""
    terminal.type(keys)
    assert terminal.process.wait(PATIENCE) == 0


def test_two_turns(chatting: Chatting, model: Any, tmp_path: Path) -> None:
    chat = chatting("--max-tokens", "12")
    assert "a context of" in plain(chat.until("\n> "))
    first, note = turn(chat, "Tell me a story")
    assert first == model.generate([said("Tell me a story")], 12).text
    assert re.match(r"12 tokens, [\d.]+ tokens/s, the first after", note)
    messages = [said("Tell me a story"), {"role": "assistant", "content": first}, said("And then?")]
    second, _ = turn(chat, "And then?")
    assert second == model.generate(messages, 12).text

    saved = tmp_path / "chat.json"
    chat.type(f"/save {saved}\n".encode())
    chat.until("4 messages in.*> ")
    kept = json.loads(saved.read_text("utf-8"))
    assert kept == [*messages, {"role": "assistant", "content": second}]
    chat.type(f"/save {tmp_path / 'chat.txt'}\n".encode())
    chat.until("4 messages in.*> ")
    assert (tmp_path / "chat.txt").read_text("utf-8").startswith("user: Tell me a story\n\nassis")

    chat.type(b"/reset\n")
    chat.until("A new conversation.*> ")
    assert turn(chat, "Tell me a story")[0] == first  # not the third turn
    leave(chat, b"\x04")


def test_ctrl_c_stops_the_reply(chatting: Chatting, tmp_path: Path) -> None:
    chat = chatting("--max-tokens", str(LONG))
    chat.until("\n> ")
    chat.type(b"Talk\n")
    chat.until(r"Talk\r\n.*\w{3}")
    chat.type(b"\x03")
    note = plain(chat.until(r"\[\d+ tokens?, [^\]]*\].*> "))
    found = re.search(r"\[(\d+) tokens?, .* stopped\]", note)
    assert found is not None, note
    assert 0 < int(found[1]) < LONG
    saved = tmp_path / "chat.json"
    chat.type(f"/save {saved}\n".encode())
    chat.until("2 messages in.*> ")  # what was written stays
    assert json.loads(saved.read_text())[1]["content"]
    chat.type(b"half a line\x03")  # nothing runs: the line is dropped
    chat.until("Ctrl-D or /exit ends.*> ", again=b"\x03")
    chat.type(b"Again\n")
    chat.until(r"Again\r\n.*\w{3}")
    chat.type(b"\x03")
    chat.until(r"stopped\].*> ")
    leave(chat)


def with_template(model: Path, folder: Path, before: str) -> Path:
    """A copy of the model, whose chat template begins with `before`."""
    copytree(model, folder)
    (folder / "chat_template.jinja").write_text(before + TEMPLATE)
    return folder


def test_ctrl_c_in_a_slow_template(chatting: Chatting, talker: Path, tmp_path: Path) -> None:
    slow = "{% for i in range(500) %}{% for j in range(5000) %}{% endfor %}{% endfor %}"
    folder = with_template(talker, tmp_path / "slow", slow)
    chat = chatting("--max-tokens", str(LONG), folder=folder)
    chat.until("\n> ")
    chat.type(b"Talk\n")
    chat.until(r"Talk\r\n")
    time.sleep(0.2)  # it has read the line
    chat.type(b"\x03")
    chat.until(r"\[\d+ tokens?,[^\]]* stopped\].*> ")
    leave(chat)


def test_ctrl_c_in_a_long_prompt(chatting: Chatting, talker: Path, tmp_path: Path) -> None:
    long = "{% if 'long' in messages[-1]['content'] %}{{ 'a b ' * 7000 }}{% endif %}"
    folder = with_template(talker, tmp_path / "long", long)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**16}))
    chat = chatting("--max-tokens", "5", "--context", "32k", folder=folder)
    chat.until("\n> ")
    chat.type(b"Read a long one\n")
    chat.until(r"one\r\n")
    time.sleep(0.5)  # it reads
    chat.type(b"\x03")
    chat.until(r"\[0 tokens, stopped\].*> ")
    assert "5 tokens" in turn(chat, "Talk")[1]
    leave(chat)


def test_commands_of_a_conversation(chatting: Chatting, tmp_path: Path) -> None:
    chat = chatting("--max-tokens", "3", columns=60)
    chat.until("\n> ")
    for typed, shown in (
        ("/help", r"/reset .*/save FILE .*Ctrl-C stops"),
        ("/dance", "/dance is not a command"),
        ("/save", "which file"),
        (f"/save {tmp_path}/none/chat.txt", "cannot be written: there is no"),
    ):
        chat.type(typed.encode() + b"\n")
        chat.until(f"{shown}.*> ")
    chat.type(b"one \\\n")
    chat.until(r"\. ")
    chat.type(b"line\n")
    chat.until(r"\[3 tokens.*> ")
    saved = tmp_path / "chat.json"
    chat.type(f"/save {saved}\n".encode())
    chat.until("2 messages in.*> ")
    assert json.loads(saved.read_text())[0] == said("one \nline")
    leave(chat, b"/quit\n")


def test_a_full_context_ends_no_conversation(chatting: Chatting) -> None:
    chat = chatting("--max-tokens", "8", "--context", "48")
    chat.until("\n> ")
    turn(chat, "hello")
    chat.type(b"a much longer message that has more tokens than there is room for, by far\n")
    told = plain(chat.until("/reset begins a new conversation.*> "))
    assert "48" in told
    chat.type(b"/reset\n")
    chat.until("A new conversation.*> ")
    assert turn(chat, "hello")[0]


def test_without_a_template_lines_are_completed(chatting: Chatting, stories: Path) -> None:
    chat = chatting("--max-tokens", "8", folder=stories, columns=60)
    begun = plain(chat.until("\n> "))
    assert "It has no chat template: it completes text" in begun
    assert all(len(line) <= 60 for line in begun.split("\n"))
    assert turn(chat, "Once upon a time")[0] == turn(chat, "Once upon a time")[0]


def test_a_file_gets_replies_alone(chatting: Chatting, model: Any, tmp_path: Path) -> None:
    with (tmp_path / "replies.txt").open("wb") as file:
        chat = chatting("--max-tokens", "5", output=file)
        chat.until("Ctrl-D ends.*> ")
        chat.type(b"hello\n")
        chat.until(r"\[5 tokens.*> ")
        leave(chat, b"\x04")
    reply = model.generate([said("hello")], 5).text
    assert (tmp_path / "replies.txt").read_text("utf-8") == f"{reply}\n"


def test_without_colours_and_unicode(chatting: Chatting) -> None:
    chat = chatting(
        "--max-tokens", "4", NO_COLOR="1", PYTHONUTF8="0", PYTHONIOENCODING="ascii", TERM="dumb"
    )
    assert "\x1b" not in chat.until("\n> ")
    chat.type("naïve\n".encode())
    assert "\x1b" not in chat.until("> ")
    chat.type(b"plain\n")
    chat.until(r"\[4 tokens.*> ")
    leave(chat, b"\x04")


@pytest.mark.soak
def test_what_was_compiled_once_is_read_by_the_next_process(
    process: Process, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    words = ("chat", str(stories), "--device", "cpu", "--engine", "jax", "--prompt", "Once")
    kept = []
    for _ in range(2):
        ended = process(*words, "--max-tokens", "4", ANYDEVICE_HOME=str(tmp_path / "home"))
        assert ended.returncode == 0, ended.stderr
        files = (tmp_path / "home").rglob("*-cache")
        kept.append(sorted(file.name for file in files))
    assert len(kept[0]) > 3
    assert kept[0] == kept[1]


@pytest.mark.soak
def test_a_real_model_knows_of_what_was_said(chatting: Chatting) -> None:
    file = Path(__file__).parents[2] / SMOLLM2
    if not file.exists():
        pytest.skip(f"there is no {SMOLLM2}; make chat fetches it")
    chat = chatting("--engine", "jax", "--context", "1k", "--max-tokens", "40", folder=file)
    chat.until("\n> ")
    assert "Paris" in turn(chat, "What is the capital of France?")[0]
    assert "Rome" in turn(chat, "And of Italy?")[0]
    leave(chat, b"\x04")


def test_a_reply_in_numbers() -> None:
    speed = llm.Speed(prompt_tokens=3, first_token=0.5, prefill=6.0, decode=20.0)
    reply = llm.Reply("hi", (1, 2), "stop", None, speed)
    assert described(reply) == "[2 tokens, 20.0 tokens/s, the first after 500 ms]"
    nothing = llm.Reply("", (), "interrupted", None, llm.Speed(3, 0.0, 0.0, 0.0))
    assert described(nothing) == "[0 tokens, stopped]"


def test_the_help_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--prompt", "--system", "--context", "--max-tokens", "--temperature", "--seed"):
        assert option in text
    longest = inspect.signature(llm.LanguageModel.generate).parameters["max_tokens"].default
    assert f"without a chat template {longest})" in " ".join(text.split())


def test_a_reply_ends_with_the_context(talker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody says how long it may be, and the model does not end it."""
    assert main(["chat", str(talker), *HERE, "--prompt", "hi", "--json", "--context", "300"]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["ended"] == "length"
    assert len(reply["tokens"]) > 200
