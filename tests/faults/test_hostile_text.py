"""Damaged tokenizers, settings and chat templates: an error of ours, or a tokenizer that is right.

The library behind a tokenizer is not Python: it may end the process, so all is read in a child.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anydevice._llm.text import TextStream
from anydevice._llm.tokenizer import Tokenizer
from anydevice.errors import AnyDeviceError, UnsupportedError
from tests.faults.damage import at_random, by_meaning
from tests.llm.test_template import CONVERSATIONS, FEATURES, REAL
from tests.llm.tokenizer_files import BYTES, UNIGRAM, WORDS
from tests.programs import output_of

ROOT = Path(__file__).parents[2]
SLOWEST = 10.0
"""Seconds that a damaged file may take."""
MEMORY = 96 * 2**20
"""Bytes that a child may take on top of what it has when it starts, of files below 100 kB."""

TEXTS = ["", "hello world's 12345  <s>x</s>", "Ça 漢字🎉\n\n\t", "<tool>" + "a" * 200]
SETTINGS: dict[str, Any] = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "pad_token": None,
    "added_tokens_decoder": {
        "0": {"content": "<s>", "special": True, "lstrip": False},
        "263": {"content": "<|new|>", "special": True, "normalized": False},
    },
    "chat_template": [
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{% for m in messages %}{{ m }}{% endfor %}{{ tools }}"},
    ],
    "model_max_length": 5,
    "clean_up_tokenization_spaces": True,
}
GENERATION = {"eos_token_id": [1, 2], "bos_token_id": 0, "max_length": 3}
NAMES = ["type", "content", "id", "ids", "vocab", "merges", "pattern", "decoders", "normalizers"]
NAMES += ["Regex", "String", "single", "special", "0", "263", "eos_token_id", "unk_id", "template"]

Files = dict[str, bytes]
WHOLE: list[Files] = [
    {
        "tokenizer.json": json.dumps(values, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(SETTINGS).encode(),
        "generation_config.json": json.dumps(GENERATION).encode(),
        "special_tokens_map.json": json.dumps({"unk_token": {"content": "<unk>"}}).encode(),
    }
    for values in (BYTES, UNIGRAM, WORDS)
]
# The id that the settings expect of their new token is that of the first vocabulary.
for files in WHOLE[1:]:
    files["tokenizer_config.json"] = json.dumps(
        {key: value for key, value in SETTINGS.items() if key != "added_tokens_decoder"}
    ).encode()


def _damaged_files(dice: random.Random) -> Files:
    files = dict(dice.choice(WHOLE))
    name = dice.choice(["tokenizer.json"] * 6 + ["tokenizer_config.json"] * 2 + [*files])
    if dice.random() < 0.4:
        files[name] = at_random(dice, files[name])
    else:
        tree = json.loads(files[name])
        for _ in range(dice.choice([1, 1, 2, 4])):
            by_meaning(dice, tree, NAMES)
        files[name] = json.dumps(tree, ensure_ascii=dice.random() < 0.5).encode("utf-8", "replace")
    return files


def _damaged_template(dice: random.Random) -> Files:
    texts = [*FEATURES.values(), *_real_templates()]
    damaged = at_random(dice, dice.choice(texts).encode())
    if dice.random() < 0.3:  # most bytes are damaged within text, which does no harm
        damaged = damaged.replace(b"messages", dice.choice([b"range(9)", b"tools", b"self", b"1"]))
    return {**WHOLE[0], "chat_template.jinja": damaged}


_read: list[str] = []


def _real_templates() -> list[str]:
    if not _read and REAL.is_dir():
        _read.extend(path.read_text("utf-8") for path in sorted(REAL.glob("*.jinja")))
    return _read


def _use(files: Files, dice: random.Random) -> None:
    """Read the files; what they make is right, or `AnyDeviceError` is raised."""
    tokenizer = Tokenizer.from_files(files, "damaged")
    assert all(0 <= token < 2**32 for token in tokenizer.eos_ids)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.encode(text)
        if tokenizer.adds_bos:
            assert ids[0] == tokenizer.bos_id
            assert ids[1:2] != [tokenizer.bos_id]
        _check_stream(tokenizer, ids)
    _check_stream(tokenizer, [dice.randrange(tokenizer.size + 3) for _ in range(20)])
    if tokenizer.templates:
        tokenizer.encode_chat(**dice.choice([*CONVERSATIONS.values()]))


def _check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)


def _run(kind: str, first: int, count: int) -> None:
    """In the child: damage and read, and say which case it is before it begins."""
    import resource  # Windows has none

    damage: Callable[[random.Random], Files] = globals()[f"_damaged_{kind}"]
    for files in WHOLE:  # and import what is needed, before memory is limited
        _use(files, random.Random(0))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    outcomes = {"right": 0, "refused": 0}
    for seed in range(first, first + count):
        print(seed, file=sys.stderr, flush=True)
        dice = random.Random(f"{kind} {seed}")
        files, began = damage(dice), time.monotonic()
        try:
            _use(files, dice)
            outcomes["right"] += 1
        except UnsupportedError:
            raise  # it says that a package is missing
        except AnyDeviceError:
            outcomes["refused"] += 1
        seconds = time.monotonic() - began
        assert seconds < SLOWEST, f"{kind} {seed} took {seconds:.1f} s"
    print(json.dumps(outcomes))


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory so")


@pytest.mark.parametrize(
    ("kind", "first", "count"),
    [
        ("files", 0, 120),
        ("template", 0, 80),
        pytest.param("files", 1000, 3000, marks=pytest.mark.soak),
        pytest.param("template", 1000, 1000, marks=pytest.mark.soak),
    ],
)
def test_a_damaged_file_is_refused_or_read_right(kind: str, first: int, count: int) -> None:
    arguments = ("-m", "tests.faults.test_hostile_text", kind, str(first), str(count))
    printed = output_of(*arguments, cwd=ROOT, env={"RUST_BACKTRACE": "0"}, limit=3000)
    outcomes: dict[str, int] = json.loads(printed.splitlines()[-1])
    assert sum(outcomes.values()) == count
    # Damage that never matters would test nothing.
    assert first or min(outcomes.values()) > count / 20


if __name__ == "__main__":
    _run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
