"""Text to tokens and back: as transformers does it, with BOS exactly once."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydevice._llm import tokenizer as tokenization
from anydevice._llm.text import TextStream
from anydevice._llm.tokenizer import Tokenizer
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.llm import tokenizer_files
from tests.llm.test_text import cut, streamed
from tests.llm.tokenizer_files import BYTES, UNIGRAM, WORDS, Values, changed
from tests.programs import output_of, run_python

pytest.importorskip("tokenizers")

TEXTS = [
    "",
    " ",
    "hello world",
    "Hello  wörld!\n\n\t12345 's",
    "漢字🎉",
    "<s>hello",
    "a<tool>b</s>",
]
TEXTS += ["  <tool>  ", "<s><s>hello", "<S>", "x" * 300, "hell\u0301o\u0000", "<|x|>", "▁a▁"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
MESSAGES = [{"role": "user", "content": "hello"}]


def folder_with(folder: Path, files: dict[str, Any]) -> Path:
    for name, values in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def made(values: Values = BYTES, **files: Any) -> Tokenizer:
    """A tokenizer of values; the files are named without their `.json`."""
    named = {f"{name}.json": each for name, each in files.items()}
    return Tokenizer.from_files({"tokenizer.json": values, **named}, "test")


def theirs(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("values", [BYTES, UNIGRAM, WORDS], ids=["bytes", "unigram", "words"])
def test_texts_are_the_tokens_that_transformers_finds(tmp_path: Path, values: Values) -> None:
    whole = changed(values, truncation=None, padding=None)
    folder = folder_with(tmp_path, {"tokenizer.json": whole, "tokenizer_config.json": SPECIAL})
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    for text in TEXTS:
        expected = other(text)["input_ids"]
        if ours.adds_bos:
            while expected[1:2] == [ours.bos_id]:
                del expected[0]
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == other.decode(expected, skip_special_tokens=True)


@lru_cache
def _stories(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_folder(folder), theirs(folder)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_stories_reads_any_text_as_transformers_does(stories: Path, text: str) -> None:
    ours, other = _stories(stories)
    ids = ours.encode(text)
    assert ids == other(text)["input_ids"]
    assert ours.decode(ids) == other.decode(ids, skip_special_tokens=True)


def test_golden_text_of_stories_goes_there_and_back(stories: Path) -> None:
    tokenizer, _ = _stories(stories)
    golden = (stories / "golden.txt").read_text("utf-8")
    assert tokenizer.decode(tokenizer.encode(golden)) == golden


# --- BOS and EOS ------------------------------------------------------------------------------

WITH, WITHOUT = "{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"


@pytest.mark.parametrize("text", ["hello", "<s>hello", "<s><s>hello", ""])
@pytest.mark.parametrize("template", [WITH, WITHOUT, "<s>" + WITH])
def test_bos_is_there_exactly_once(text: str, template: str) -> None:
    tokenizer = made(tokenizer_config=SPECIAL | {"chat_template": template})
    assert tokenizer.adds_bos
    expected = tokenizer.encode("")
    assert expected == [tokenizer.bos_id] == [0]
    expected += tokenizer.encode("hello")[1:] if "hello" in text else []
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_chat([{"role": "user", "content": text}]) == expected


def test_bos_is_added_only_where_the_file_says_so() -> None:
    config = SPECIAL | {"chat_template": WITH}
    tokenizer = made(changed(BYTES, post_processor=None), tokenizer_config=config)
    assert not tokenizer.adds_bos
    assert tokenizer.encode("hello")[:1] != [0]
    assert tokenizer.encode("<s><s>")[:3] == [0, 0]  # as they were typed
    assert tokenizer.encode_chat(MESSAGES)[:2] == [0, *tokenizer.encode("hello")[:1]]


def test_a_conversation_gets_no_eos_for_a_text() -> None:
    template = "{{ messages[0].content }}"
    tokenizer = made(UNIGRAM, tokenizer_config=SPECIAL | {"chat_template": template})
    assert tokenizer.encode("hello")[-1:] == [2]
    assert tokenizer.encode_chat(MESSAGES) == tokenizer.encode("hello")[:-1]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9, 1]}, {"eos_token_id": 5}, (1, 7, 9)),
        ({"eos_token_id": 7}, {}, (1, 7)),
        ({"eos_token_id": None}, {"eos_token_id": [3]}, (1, 3)),
        ({}, {}, (1,)),
    ],
)
def test_every_end_is_known(generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    tokenizer = made(generation_config=generation, config=config, tokenizer_config=SPECIAL)
    assert tokenizer.eos_ids == expected


@pytest.mark.parametrize("wrong", ["</s>", -1, 2**32, True, [[1]], [1, None], 1.5, {}])
def test_an_eos_that_is_none_names_its_file(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"test/generation_config.json: eos_token_id is"):
        made(generation_config={"eos_token_id": wrong})


def test_names_of_special_tokens_come_from_either_file() -> None:
    tokenizer = made(
        special_tokens_map={"bos_token": {"content": "<s>"}, "pad_token": "<pad>"},
        tokenizer_config={"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "</s>"},
    )
    expected = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    assert tokenizer.special_tokens == expected
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))


# --- what the files may say -------------------------------------------------------------------


def test_nothing_is_cut_or_padded_or_drawn_at_random() -> None:
    assert BYTES["truncation"]["max_length"] == 5  # the file would cut and pad
    assert BYTES["padding"]["strategy"] == {"Fixed": 10}
    assert len(made().encode("hello world, again and again")) > 20
    assert len(made().encode("a")) == 2
    drawn = made(changed(BYTES, model=BYTES["model"] | {"dropout": 0.9, "ignore_merges": False}))
    expected = made().encode("hello hello")
    assert all(drawn.encode("hello hello") == expected for _ in range(20))


def test_tokens_that_only_the_settings_list_are_added() -> None:
    vocabulary = made().size
    listed = {
        str(vocabulary): {"content": "<|new|>", "special": True},
        str(vocabulary + 1): {"content": "<|seen|>", "special": False},
        "0": {"content": "<s>", "special": True},
    }
    tokenizer = made(tokenizer_config={"added_tokens_decoder": listed})
    ids = tokenizer.encode("a<|new|><|seen|>")
    assert ids[-2:] == [vocabulary, vocabulary + 1]
    assert tokenizer.decode(ids) == "a<|seen|>"
    with pytest.raises(ConfigurationError, match="the files are of different models"):
        made(tokenizer_config={"added_tokens_decoder": {"9999": {"content": "<|new|>"}}})


def test_a_special_token_of_the_vocabulary_is_one_in_a_text() -> None:
    plain = changed(BYTES, added_tokens=[])
    assert made(plain).encode("</s>") != [0, 1]
    assert made(plain, tokenizer_config=SPECIAL).encode("</s>") == [0, 1]
    # One that is not in the vocabulary gets no id that the model would not know.
    named = made(plain, tokenizer_config=SPECIAL | {"pad_token": "[PAD]"})
    assert max(named.encode("[PAD]")) < named.size == made(plain).size


def settings_of(**values: Any) -> dict[str, Any]:
    return {"tokenizer.json": BYTES, "tokenizer_config.json": values}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json is damaged, or needs newer tokenizers: "),
        ({"tokenizer.json": BYTES, "config.json": "["}, "config.json is not JSON: "),
        ({"tokenizer.json": BYTES, "config.json": "[]"}, "config.json is not a JSON object"),
        ({"tokenizer.json": BYTES, "config.json": '{"a": "\\ud800"}'}, "half a surrogate pair"),
        (settings_of(chat_template=3), "tokenizer_config.json: chat_template is neither"),
        (
            settings_of(added_tokens_decoder={"a": 1}),
            r"json: added_tokens_decoder\['a'\] is not a to",
        ),
        ({}, "has no tokenizer.json: copy it"),
        ({"tokenizer.model": "x"}, r"has only tokenizer.model.* Make a tokenizer.json of it: pyth"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Tokenizer.from_folder(folder_with(tmp_path, files))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder_with(tmp_path, {"tokenizer.json": BYTES})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"chat_template.jinja is not UTF-8"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigurationError, match=r"config.json cannot be read: Is a directory"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigurationError, match="nowhere is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


REPLACES = {"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 9}
INSERTS = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "l"}
CHARSMAP = base64.b64encode(bytes(4) + b"a" * 999).decode()
BOMBS: dict[str, tuple[str, list[Values]]] = {
    "replacing": ("normalizer", [REPLACES] * 30),
    "inserting": ("normalizer", [INSERTS] * 30),
    "tables": ("normalizer", [{"type": "Precompiled", "precompiled_charsmap": CHARSMAP}]),
    "bytes of bytes": ("pre_tokenizer", [BYTES["decoder"] | {"use_regex": False}] * 30),
    "decoding": ("decoder", [REPLACES] * 30),
    "suffixes": ("decoder", [{"type": "BPEDecoder", "suffix": ""}] * 30),
    "prefixes": ("normalizer", [{"type": "Prepend", "prepend": "a" * 2_000_000}]),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_text_cannot_grow_without_end(bomb: str) -> None:
    part, steps = BOMBS[bomb]
    inner = part.replace("_", "") + "s"
    with pytest.raises(ConfigurationError, match="a short text would become a very long one"):
        made(changed(BYTES, **{part: {"type": "Sequence", inner: steps}}))


IN_LITTLE_MEMORY = """
import resource, sys
from anydevice._llm.tokenizer import Tokenizer
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
Tokenizer.from_folder(sys.argv[1])
"""


def test_a_normalizer_is_bounded_before_it_runs_on_added_tokens(tmp_path: Path) -> None:
    token = tokenizer_files.added("l" * 9)[0] | {"special": False, "normalized": True}
    bomb = {"type": "Sequence", "normalizers": [REPLACES] * 30}
    folder_with(tmp_path, {"tokenizer.json": changed(BYTES, added_tokens=[token], normalizer=bomb)})
    said = run_python("-c", IN_LITTLE_MEMORY, str(tmp_path)).stderr
    assert "a short text would become a very long one" in said


@pytest.mark.parametrize("affix", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_the_affix_of_each_part_of_a_word_is_bounded(affix: str) -> None:
    model = BYTES["model"] | {"merges": [], affix: "a" * 2_000_000}
    with pytest.raises(ConfigurationError, match="a short text would become a very long one"):
        made(changed(BYTES, model=model))


def test_special_tokens_without_end_are_refused() -> None:
    item = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    post = {
        "type": "TemplateProcessing",
        "single": [item] * 1000,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0] * 1000, "tokens": ["<s>"] * 1000}},
    }
    with pytest.raises(ConfigurationError, match="a short text would become a very long one"):
        made(changed(BYTES, post_processor=post))


def test_a_panic_of_the_library_is_an_error_of_ours() -> None:
    broken = changed(BYTES, normalizer=REPLACES | {"pattern": {"String": ""}})
    with pytest.raises(ConfigurationError, match=r"test/tokenizer.json cannot encode a text"):
        made(broken).encode("hello")
    with pytest.raises(ConfigurationError, match=r"test/tokenizer.json cannot decode tokens"):
        made().decode([-1])


HOSTILE = r"(?:\w|\w\w){0,22}(?!\w)"
"""A quarter of a second for each character of a word."""


def split_by(pattern: str) -> Tokenizer:
    steps = [tokenizer_files.split_by(pattern), BYTES["decoder"] | {"use_regex": False}]
    return made(changed(BYTES, pre_tokenizer={"type": "Sequence", "pretokenizers": steps}))


def test_a_pattern_that_takes_hours_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "SECONDS", 1.0)
    tokenizer = split_by(HOSTILE)
    short = tokenizer.encode("a b")  # now there is a child
    began, ticks = time.monotonic(), list[float]()

    def tick() -> None:
        while time.monotonic() < began + 0.9:
            ticks.append(time.monotonic())
            time.sleep(0.1)

    threading.Thread(target=tick).start()
    with pytest.raises(ConfigurationError, match=r"tokenizer.json took more than 1.* was stopped"):
        tokenizer.encode("a" * 4000)
    assert time.monotonic() - began < 60
    assert len(ticks) > 2  # other threads went on meanwhile
    assert tokenizer.encode("a b") == short


@pytest.mark.parametrize("pattern", sorted(tokenization.KNOWN), ids=range(len(tokenization.KNOWN)))
def test_known_patterns_are_read_and_take_little_time_for_any_text(pattern: str) -> None:
    tokenizer = split_by(pattern)
    assert tokenizer._encoder is None
    assert split_by(pattern.replace(r"\r", "\r").replace(r"\n", "\n"))._encoder is None
    began = time.process_time()
    for run in (" ", "\n", " \n", "\t", "a", "aB", "1", "!", "!a", "'", "漢", "é", "\u0301", "🙂"):
        tokenizer.encode(run * 3000)
        tokenizer.encode(run * 3000 + "x" + run * 3000)
    assert time.process_time() - began < 3  # of characters that a pattern goes over again: hours


def test_a_pattern_that_is_not_known_gives_the_same_tokens() -> None:
    """Another spelling of one that is known."""
    known, other = split_by(tokenization.LLAMA3), split_by(f"(?:{tokenization.LLAMA3})")
    assert known._encoder is None
    assert other._encoder is not None
    for text in ("", "Hello there,  we'll see 12345\n\n ok", "naïve “dog” 漢字 🙂" * 20):
        assert other.encode(text) == known.encode(text)
    replace = {"type": "Replace", "pattern": {"Regex": "l(?=l)"}, "content": "L"}
    decoder = {"type": "Sequence", "decoders": [BYTES["decoder"], replace]}
    replacing = made(changed(BYTES, decoder=decoder))
    assert replacing.decode(replacing.encode("hello")) == "heLlo"


@pytest.mark.parametrize("text", [None, 3, b"hello", ["hello"], "ab\ud800"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    half = "character 2 of the text is half a surrogate"
    with pytest.raises(ConfigurationError, match=half if isinstance(text, str) else "is not a te"):
        made().encode(text)


def test_without_tokenizers_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match=r'pip install "\.\[llm\]" in a clone'):
        made()


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, anydevice._llm.tokenizer, anydevice._llm.text\n"
        "print({'tokenizers', 'jinja2', 'torch', 'jax', 'mlx'} & set(sys.modules))"
    )
    assert output_of("-c", code) == "set()\n"


# --- chat templates ---------------------------------------------------------------------------


def test_without_a_template_the_error_says_what_to_do() -> None:
    said = r"test has no chat template.* chat_template.jinja"
    with pytest.raises(ConfigurationError, match=said):
        made().encode_chat(MESSAGES)


@pytest.mark.parametrize("from_files", [False, True])
def test_templates_have_names(tmp_path: Path, from_files: bool) -> None:
    texts = {"default": "{{ bos_token }}d", "tool_use": "t{{ tools|length }}", "rag": "r"}
    listed = [{"name": name, "template": text} for name, text in texts.items()]
    files: dict[str, Any] = {"tokenizer.json": BYTES, "tokenizer_config.json": dict(SPECIAL)}
    if from_files:
        files["tokenizer_config.json"]["chat_template"] = "replaced"
        files["chat_template.jinja"] = texts["default"]
        files |= {f"additional_chat_templates/{n}.jinja": texts[n] for n in ("tool_use", "rag")}
    else:
        files["tokenizer_config.json"]["chat_template"] = listed
    folder = folder_with(tmp_path, files)
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    asked: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": [{"type": "function"}]}]
    for tools in asked:
        expected = other.apply_chat_template(MESSAGES, tokenize=False, **tools)
        assert ours.render_chat(MESSAGES, **tools) == expected
    expected = other.apply_chat_template(MESSAGES, tokenize=False, chat_template="rag")
    assert ours.render_chat(MESSAGES, template="rag") == expected == "r"
    with pytest.raises(ConfigurationError, match="has no chat template 'poem'; it has default"):
        ours.render_chat(MESSAGES, template="poem")


def test_a_template_that_lies_in_its_own_json_is_found(tmp_path: Path) -> None:
    files = {"tokenizer.json": BYTES, "chat_template.json": {"chat_template": "old"}}
    assert Tokenizer.from_folder(folder_with(tmp_path, files)).render_chat(MESSAGES) == "old"
    folder_with(tmp_path, {"tokenizer_config.json": {"chat_template": "newer"}})
    assert Tokenizer.from_folder(tmp_path).render_chat(MESSAGES) == "newer"


def test_a_conversation_is_the_tokens_that_transformers_finds(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}<tool>{{ m.role }} {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<tool>{% endif %}{{ pad_token }}{{ mood }}"
    )
    config, values = SPECIAL | {"chat_template": template}, changed(BYTES, padding=None)
    files = {"tokenizer.json": values, "tokenizer_config.json": config}
    folder = folder_with(tmp_path, files)
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    for text in TEXTS:
        # Special tokens in a message are these tokens, there and here.
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
        for prompt in (True, False):
            expected = other.apply_chat_template(
                messages, add_generation_prompt=prompt, return_dict=False, mood="glad"
            )
            got = ours.encode_chat(messages, add_generation_prompt=prompt, mood="glad")
            assert got == expected, text


# --- a real byte-level vocabulary -------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm(smollm2: Path) -> Tokenizer:
    from anydevice._formats.gguf import read_gguf

    pytest.importorskip("gguf")
    return Tokenizer.from_gguf(read_gguf(smollm2))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, 49200) | st.integers(0, 300), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab e\n�"), min_size=1, max_size=3), max_size=2),
)
def test_random_tokens_are_streamed(smollm: Tokenizer, ids: list[int], stops: list[str]) -> None:
    stream = TextStream(smollm, stops)
    assert (streamed(stream, ids), stream.stopped) == cut(smollm.decode(ids), stops)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_of_smollm_comes_back_in_whole_characters(smollm: Tokenizer, text: str) -> None:
    stream = TextStream(smollm)
    ids = smollm.encode(text)
    pieces = [stream.push(token) for token in ids]
    if smollm.decode(ids) == text:  # it has no tokens for some bytes
        assert "".join(pieces) == text  # nothing is left for `finish`
        assert "�" in text or "�" not in "".join(pieces)
