"""Text to tokens and back, by the tokenizer files beside a model's weights.

Hugging Face's `tokenizers` reads `tokenizer.json`, which has the tokenizer of the training. The
other files name special tokens, end tokens and chat templates. Nothing in them is executed, except
for chat templates, which run in a sandbox.

`tokenizer.json` holds untrusted regular expressions. Those of well-known models take linear time.
Another pattern may take hours for one line, so a tokenizer with an unknown pattern runs in a child
process with a time limit.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydevice._core.checks import is_integer
from anydevice._core.child.parent import Conversation, Outcome
from anydevice._core.files import expanded, parse_json, read_small
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import NOTHING
from anydevice._core.text import install_command, shortened
from anydevice._formats.gguf import GgufFile
from anydevice._formats.gguf_tokenizer import PIECES, Splitting, tokenizer_files
from anydevice._llm.template import ChatTemplate, ask_to_start, function_child
from anydevice.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    import tokenizers

Steps = list[dict[str, Any]]
"""The steps of a part of a tokenizer, as `tokenizer.json` describes them."""

SECONDS, CHARACTERS = 5.0, 100_000
"""Time limit of a pattern for a text, and the number of characters that add a second to it."""
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
)
_REST_OF_CASED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTED}{_WORD}|\p{{N}}{{1,3}}{_REST}"
QWEN2 = rf"{_CONTRACTED}{_WORD}|\p{{N}}{_REST}"
GPT4O = _CASED.replace("{end}", f"{_CONTRACTED}?") + r"|\p{N}{1,3}" + _REST_OF_CASED
_TEKKEN = _CASED.replace("{end}", "") + r"|\p{N}" + _REST_OF_CASED
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_KANJI_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

KNOWN = {GPT2, LLAMA3, QWEN2, GPT4O, _TEKKEN, _DEEPSEEK, _KANJI_AND_KANA}
KNOWN |= {r"\p{N}", r"\p{N}{1,3}", r"\d", r"\s+", " {2,}", " +"}
"""Harmless patterns: none of them backtracks much."""


class BoundedTokenizer:
    """A tokenizer in a child process, which is stopped if it takes too long."""

    @classmethod
    def where_needed(
        cls, backend: tokenizers.Tokenizer, steps: Sequence[dict[str, Any]], source: str
    ) -> BoundedTokenizer | None:
        """Return a bounded tokenizer if these steps have a pattern that may be harmful."""
        for step in steps:
            pattern = step.get("pattern")
            pattern = pattern.get("Regex") if isinstance(pattern, dict) else None
            # Most files write line ends as escapes.
            if (
                pattern is not None
                and pattern.replace("\r", r"\r").replace("\n", r"\n") not in KNOWN
            ):
                return cls(backend, pattern, source)
        return None

    def __init__(self, backend: tokenizers.Tokenizer, pattern: str, source: str) -> None:
        self._backend, self._pattern, self._source = backend, pattern, source
        self._key = next(_keys)

    def ids(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text."""
        return list(self._ask("special" if special else "ids", text))

    def text(self, ids: list[int]) -> str:
        """Return the text of tokens, without the special ones."""
        return str(self._ask("text", ids))

    def _start(self) -> Outcome:
        """Send this tokenizer to the child unless it has it; that may take a while."""
        outcome = ask_to_start(_child(), (self._key, None, "text", []))
        if outcome.how == "answered" and outcome.answer is None:
            outcome = ask_to_start(_child(), (self._key, self._backend.to_str(), "text", []))
        return outcome

    def _ask(self, kind: str, given: str | list[int]) -> Any:
        limit = SECONDS + len(given) / CHARACTERS
        with _turn.native:  # the child has one tokenizer at a time
            outcome = self._start()
            if outcome.how == "answered":
                outcome = _child().ask((self._key, None, kind, given), limit=limit)
        if outcome.how == "not_started":
            raise UnsupportedError(
                f"{self._source} has the pattern {shortened(self._pattern)!r}, which may run "
                f"forever, and no child process can be started to limit it: {outcome.error}"
            )
        how, value = outcome.answer if outcome.how == "answered" else (outcome.how, outcome.error)
        if how == "done":
            return value
        what = f"took more than {limit:g} s" if how == "timed_out" else f"failed ({value or how})"
        raise ConfigurationError(
            f"{self._source} {what} on a text of {len(given)} characters, and was stopped; its "
            f"pattern is {shortened(self._pattern, 200)!r}",
            self._source,
        )


_keys, _turn = itertools.count(), ForkSafeLock()


@lru_cache(1)
def _child() -> Conversation:
    return function_child(answering)


def answering(
    tell: Callable[[str], None], arguments: dict[str, Any]
) -> Callable[[Any], tuple[str, Any] | None]:
    """Return the child's function that encodes and decodes; `None` for an unknown tokenizer."""
    import tokenizers

    known: dict[int, tokenizers.Tokenizer] = {}

    def answer(question: Any) -> tuple[str, Any] | None:
        key, serialized, kind, given = question
        if serialized is not None:
            known.clear()  # vocabularies are large
            known[key] = tokenizers.Tokenizer.from_str(serialized)
        if key not in known:
            return None
        try:
            if kind == "text":
                return "done", known[key].decode(given, skip_special_tokens=True)
            return "done", known[key].encode(given, add_special_tokens=kind == "special").ids
        except BaseException as error:
            return "failed", str(error)

    return answer


TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL, GENERATION, CONFIG = "special_tokens_map.json", "generation_config.json", "config.json"

TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
OLD_TEMPLATE = "chat_template.json"

_LARGEST_TOKENIZER = 64 * 2**20
_LARGEST_SETTINGS = 16 * 2**20
"""Most bytes of a settings file."""

_MOST_GROWTH = 128
"""Most characters that one may become, and most special tokens added to a text; usually one."""
_AFFIXES = ("prepend", "continuing_subword_prefix", "end_of_word_suffix")
_MOST_TEMPLATES = 100
_TEMPLATE_KEYS = ("name", "template")
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


SPLITTINGS: dict[str, Splitting] = {
    "gpt-2": Splitting(),
    "smollm": Splitting(digits=True),
    "starcoder": Splitting(digits=True),
    "refact": Splitting(digits=True),
    "llama-bpe": Splitting(LLAMA3, whole=True, bos=True),
    "llama3": Splitting(LLAMA3, whole=True, bos=True),
    "dbrx": Splitting(LLAMA3),
    "qwen2": Splitting(QWEN2, composed=True),
    "gpt-4o": Splitting(GPT4O),
}
"""The pre-tokenizers that are reproduced exactly, by their names in GGUF."""


class Tokenizer:
    """Text to token ids and back.

    `bos_id` is the token that begins a text, or `None`; `adds_bos` tells whether every text begins
    with it; `eos_ids` are all tokens that end a reply, as `ends` are, which begins with EOS;
    `size` is the number of tokens;
    `special_tokens` has the special tokens by name, such as "bos_token", for chat templates;
    `templates` are the chat templates by name; "default" is the usual one; `decoder_kinds` are the
    steps from tokens to text, as `tokenizer.json` names them, in their order.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        steps: tuple[Steps, Steps],
        *,
        special_tokens: Mapping[str, str],
        templates: Mapping[str, ChatTemplate],
        eos_ids: Sequence[int],
        bos_id: int | None,
        source: str,
    ) -> None:
        self._backend = backend
        self.source = source
        place = f"{source}/{TOKENIZER}"
        self._encoder, self._decoder = (
            BoundedTokenizer.where_needed(backend, own, place) for own in steps
        )
        self.decoder_kinds = tuple([step["type"] for step in steps[1]])
        self.special_tokens = dict(special_tokens)
        self.templates = dict(templates)
        self.ends = tuple(dict.fromkeys(eos_ids))
        self.eos_ids = tuple(sorted(self.ends))
        self.bos_id = bos_id
        self.size = backend.get_vocab_size()
        self.adds_bos = bos_id is not None and self._ids("", special=True)[:1] == [bos_id]
        self._special = {
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        }
        self.token_bytes = lru_cache(2**16)(self._token_bytes)

    @classmethod
    def from_folder(
        cls, folder: str | Path, known: Mapping[str, Mapping[str, Any]] = NOTHING
    ) -> Tokenizer:
        """Return the tokenizer of a folder with `tokenizer.json`.

        `known` has the values of files that were already read, by name. Raises
        `ConfigurationError` if a file is missing or damaged, naming it.
        """
        folder = expanded(folder)
        if not (folder / TOKENIZER).exists():
            raise _no_tokenizer(folder)
        more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))[:_MOST_TEMPLATES]
        names = (SETTINGS, SPECIAL, GENERATION, CONFIG, TEMPLATE, OLD_TEMPLATE)
        files: dict[str, bytes | Mapping[str, Any]] = dict(known)
        for name in (*names, *[f"{MORE_TEMPLATES}/{path.name}" for path in more]):
            if name not in known and (folder / name).exists():
                files[name] = _read(folder / name)
        files[TOKENIZER] = _read(folder / TOKENIZER, _LARGEST_TOKENIZER)
        return cls.from_files(files, str(folder))

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """Return the tokenizer of a GGUF file, or of the `tokenizer.json` beside it.

        Byte-level vocabularies with a known pre-tokenizer, and SentencePiece's, are reproduced
        exactly. Raises `UnsupportedError` for any other vocabulary without a `tokenizer.json`, and
        `ConfigurationError` for a damaged one.
        """
        model = file.expect("tokenizer.ggml.model", str, "")
        pre = file.expect("tokenizer.ggml.pre", str, "")
        splitting = PIECES if model == "llama" else SPLITTINGS.get(pre) if model == "gpt2" else None
        beside = (file.path.parent / TOKENIZER).exists()
        if splitting is not None and not (splitting.pieces and beside):
            return cls.from_files(tokenizer_files(file, splitting), str(file.path))
        if beside:
            return cls.from_folder(file.path.parent)
        kind = f"{model}, {pre}" if pre else model
        raise UnsupportedError(
            f"{file.path}: its tokenizer ({shortened(kind) or 'none'}) cannot be reproduced "
            f"exactly from the file; put the {TOKENIZER} of the same model beside it"
        )

    @classmethod
    def from_files(cls, files: Mapping[str, bytes | Mapping[str, Any]], source: str) -> Tokenizer:
        """Return the tokenizer of files by name, bytes or parsed values; errors name `source`."""
        backend, steps = _backend(files[TOKENIZER], f"{source}/{TOKENIZER}")
        values = {
            name: _values(files.get(name, {}), f"{source}/{name}")
            for name in (SETTINGS, SPECIAL, GENERATION, CONFIG, OLD_TEMPLATE)
        }
        named = _named_tokens(values[SPECIAL]) | _named_tokens(values[SETTINGS])
        _add_missing(backend, values[SETTINGS], named, f"{source}/{SETTINGS}")
        return cls(
            backend,
            steps,
            special_tokens=named,
            templates=_templates(files, {**values[OLD_TEMPLATE], **values[SETTINGS]}, source),
            eos_ids=_ids_of(backend, "eos", named, values, source),
            bos_id=next(iter(_ids_of(backend, "bos", named, values, source)), None),
            source=source,
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with BOS exactly once if every text begins with it.

        Special tokens written in the text are encoded as such, as in transformers: `<s>` typed by
        a user is BOS. Nothing is truncated or padded, even if the file requests it.
        """
        return self._one_bos(self._ids(text, special=True))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the tokens of a conversation; `options` are those of `render_chat`.

        BOS is there exactly once if every text begins with it, whether the template writes it or
        not. Special tokens written in a message are encoded as such, as in transformers: remove
        them from messages of users that you do not trust.
        """
        return self._one_bos(self._ids(self.render_chat(messages, **options), special=False))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation by the model's chat template, ready for the reply.

        `tools` are JSON schemas, or functions with types and a docstring. `template` is the name of
        one of `templates`; the default with tools is "tool_use" if it exists. Other arguments are
        passed to the template. Raises `ConfigurationError` if there is no template, or, with the
        template's own message, if it refuses the messages.
        """
        return self._template(template, tools).render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    def _template(self, name: str | None, tools: Sequence[Any] | None) -> ChatTemplate:
        if not self.templates:
            raise ConfigurationError(
                f"{self.source} has no chat template, so messages cannot be written for it: give a "
                f"text as the prompt, or put the model's template there as {TEMPLATE}",
                source=self.source,
            )
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ConfigurationError(
                f"{self.source} has no chat template {shortened(name)!r}; it has "
                f"{', '.join(self.templates)}",
                source="template",
            )
        return self.templates[name]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special and unknown ones."""
        if self._decoder is not None and ids:
            return self._decoder.text(list(ids))
        try:
            return self._backend.decode(list(ids), skip_special_tokens=True)
        except BaseException as error:
            raise _refusal(error, f"{self.source}/{TOKENIZER} cannot decode tokens") from error

    def token_text(self, token: int) -> str | None:
        """Return a token as the vocabulary writes it; `None` for one that `decode` omits."""
        text = self._backend.id_to_token(token)
        return None if text in self._special else text

    def _token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token of a byte-level vocabulary."""
        text = self.token_text(token)
        if text is None:
            return b""
        values = [_BYTE_OF.get(character) for character in text]
        return text.encode() if None in values else bytes(values)  # type: ignore[arg-type]

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if not isinstance(text, str):
            raise ConfigurationError(f"{shortened(repr(text))} is not a text", source="text")
        try:
            text.encode()
            if self._encoder is not None and text:
                return self._encoder.ids(text, special)
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"character {error.start} of the text is half a surrogate pair, which is no "
                "Unicode; remove it",
                source="text",
            ) from None
        except BaseException as error:
            raise _refusal(error, f"{self.source}/{TOKENIZER} cannot encode a text") from error
        return ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos or self.bos_id is None:
            return ids
        first = next((i for i, token in enumerate(ids) if token != self.bos_id), len(ids))
        return [self.bos_id, *ids[first:]]


def _no_tokenizer(folder: Path) -> ConfigurationError:
    if not folder.is_dir():
        return ConfigurationError(f"{folder} is not a folder", source=str(folder))
    model = next((name for name in _SENTENCEPIECE if (folder / name).exists()), None)
    if model is None:
        return ConfigurationError(
            f"{folder} has no {TOKENIZER}: copy it from where the model came from",
            source=str(folder),
        )
    return ConfigurationError(
        f"{folder} has only {model}, a SentencePiece model, which is not read here. Make a "
        f'{TOKENIZER} of it: python -c "from transformers import AutoTokenizer as A; f = '
        f'{str(folder)!r}; A.from_pretrained(f).save_pretrained(f)"',
        source=str(folder / model),
    )


def _read(path: Path, limit: int = _LARGEST_SETTINGS) -> bytes:
    try:
        return read_small(path, limit=limit)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror or error}", source=str(path)
        ) from error


def read_values(path: Path) -> Mapping[str, Any]:
    """Return the values of a JSON file beside a tokenizer; empty if there is no such file."""
    return _values(_read(path), str(path)) if path.exists() else {}


def _values(file: bytes | Mapping[str, Any], source: str) -> Mapping[str, Any]:
    try:
        values = parse_json(file, finite=False) if isinstance(file, bytes) else file
    except ValueError as error:
        raise ConfigurationError(f"{source} is not JSON: {error}", source=source) from error
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{source} is not a JSON object", source=source)
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{source} holds half a surrogate pair", source=source) from None
    return values


def _backend(
    file: bytes | Mapping[str, Any], source: str
) -> tuple[tokenizers.Tokenizer, tuple[Steps, Steps]]:
    """Return a tokenizer, and its steps: from text to tokens, and back."""
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError(
            "text needs the package tokenizers, which is not installed; "
            f"run: {install_command('llm')}"
        ) from error
    data = file if isinstance(file, bytes) else json.dumps(file).encode()
    try:
        values = json.loads(file) if isinstance(file, bytes) else file
        # Without tokens first: the normalizer runs on each added token when a file is read.
        bare = {**values, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        empty = tokenizers.Tokenizer.from_str(json.dumps(bare))
        to_tokens = _steps(empty.normalizer) + _steps(empty.pre_tokenizer)
        steps = to_tokens, _steps(empty.decoder)
        # A short text must not become longer than the memory.
        grown = [math.prod(map(_growth, own)) for own in ([*to_tokens, values["model"]], steps[1])]
        if max(*grown, empty.num_special_tokens_to_add(False)) > _MOST_GROWTH:
            raise ConfigurationError(
                f"{source} replaces or adds too much: a short text would become a very long one",
                source=source,
            )
        backend = tokenizers.Tokenizer.from_buffer(data)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # BPE dropout is for training
        backend.encode("")
    except BaseException as error:
        raise _refusal(error, f"{source} is damaged, or needs newer tokenizers") from error
    return backend, steps


def _growth(step: dict[str, Any]) -> int:
    """Return the most characters that this step makes of one."""
    if step.get("type") == "Replace":
        # A pattern that matches the empty string inserts its text between all characters.
        between = not step["pattern"].get("String")
        return max(1, len(step["content"]) + between)
    if step.get("type") == "Precompiled":
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
    if step.get("type") in ("ByteLevel", "BPEDecoder", "CTC"):
        return 2
    return 1 + sum(map(len, filter(None, map(step.get, _AFFIXES))))


def _steps(component: Any) -> Steps:
    """Return the steps of a part of a tokenizer, in their order."""
    return _flat(json.loads(component.__getstate__())) if component else []


def _flat(step: dict[str, Any]) -> Steps:
    if step["type"] != "Sequence":
        return [step]
    inner = next(value for key, value in step.items() if key != "type")
    return [single for part in inner for single in _flat(part)]


def _refusal(error: BaseException, what: str) -> BaseException:
    """Return the exception to raise for one of `tokenizers`, whose panics are no `Exception`."""
    if isinstance(error, ConfigurationError):
        return error
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ConfigurationError(f"{what}: {shortened(str(error), 200)}", source=what.split()[0])
    return error


def _named_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a file names, such as "bos_token"."""
    tokens = {}
    for kind in _NAMED:
        value = values.get(f"{kind}_token")
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str) and value:
            tokens[f"{kind}_token"] = value
    return tokens


def _add_missing(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: dict[str, str], source: str
) -> None:
    """Add the special tokens that only `tokenizer_config.json` declares."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = _listed_tokens(settings, known, source)
    backend.add_tokens(list(listed.values()))
    for key, token in listed.items():
        if backend.token_to_id(token.content) != key:
            raise ConfigurationError(
                f"{source} calls token {key} {shortened(token.content)!r}, which {TOKENIZER} does "
                "not have there: the files are of different models",
                source=source,
            )
    known |= {token.content for token in listed.values()}
    # A token outside the vocabulary would get an id that the model does not know.
    missing = [t for t in named.values() if t not in known and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(text, special=True) for text in missing])


def _listed_tokens(
    settings: Mapping[str, Any], known: set[str], source: str
) -> dict[int, tokenizers.AddedToken]:
    """Return the added tokens that are listed by id and not yet known, in the order of ids."""
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    rows = settings.get("added_tokens_decoder", {})
    listed = {}
    for key, row in rows.items() if isinstance(rows, Mapping) else ():
        text = row.get("content") if isinstance(row, Mapping) else None
        if not key.isdecimal() or len(key) > 10 or not isinstance(text, str):
            raise ConfigurationError(
                f"{source}: added_tokens_decoder[{shortened(key)!r}] is not a token", source=source
            )
        if text and text not in known:
            given = {flag: row[flag] is True for flag in flags if flag in row}
            listed[int(key)] = AddedToken(text, **given)
    return dict(sorted(listed.items()))


def _templates(
    files: Mapping[str, Any], settings: Mapping[str, Any], source: str
) -> dict[str, ChatTemplate]:
    """Return the chat templates by name; files replace those of `tokenizer_config.json`."""
    # Values that are not bytes come from the model's file, not from a file of their own.
    in_model = isinstance(files.get(SETTINGS), Mapping)
    settings_file = source if in_model else f"{source}/{SETTINGS}"
    value = settings.get("chat_template")
    rows = value if isinstance(value, list) else [{"name": "default", "template": value}]
    texts = {}
    for row in rows if value is not None else ():
        name, text = (row.get(k) if isinstance(row, Mapping) else None for k in _TEMPLATE_KEYS)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigurationError(
                f"{settings_file}: chat_template is neither a text nor a list of named ones",
                source=settings_file,
            )
        texts[name] = (text, settings_file)
    for name, file in files.items():
        if name == TEMPLATE or name.startswith(f"{MORE_TEMPLATES}/"):
            stem = "default" if name == TEMPLATE else Path(name).stem
            path = f"{source}/{name}"
            try:
                texts[stem] = (file.decode(), path)
            except UnicodeDecodeError as error:
                raise ConfigurationError(f"{path} is not UTF-8: {error}", source=path) from error
    return {name: ChatTemplate(*origin) for name, origin in texts.items()}


def _ids_of(
    backend: tokenizers.Tokenizer,
    name: str,
    named: Mapping[str, str],
    values: Mapping[str, Mapping[str, Any]],
    source: str,
) -> list[int]:
    """Return the ids of BOS or EOS: the named token, then the ids of the first file with any."""
    own = backend.token_to_id(named[f"{name}_token"]) if f"{name}_token" in named else None
    first = [] if own is None else [own]
    for file in (GENERATION, CONFIG):
        value = values[file].get(f"{name}_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(is_integer(token) and 0 <= token < 2**32 for token in ids):
            raise ConfigurationError(
                f"{source}/{file}: {name}_token_id is {shortened(repr(value))}, not a token",
                source=f"{source}/{file}",
            )
        return first + ids
    return first


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(c): c for c in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""Bytes by the printable characters that byte-level vocabularies write for them."""
