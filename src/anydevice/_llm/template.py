"""Chat templates: conversations rendered in the format that the model was trained on.

A template is an untrusted Jinja program that came with the weights. It runs in jinja2's sandbox,
with the variables that Hugging Face's libraries provide, in a child process with limited time and
memory: every template ends with a text or an error.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NoReturn, Union

from anydevice._core.child.parent import Conversation, Outcome
from anydevice._core.record import Record
from anydevice._core.text import install_command, shortened
from anydevice.errors import ConfigurationError, UnsupportedError

SECONDS = 5.0
"""Time limit of a template."""
_SECONDS_TO_START = 60.0
MEMORY = 256 * 2**20
"""Bytes that the child process may allocate after its start; enforced on Linux."""
LONGEST = 2**22
"""Most characters of a rendered conversation."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a model's reasoning in messages; templates use the first two."""
_DEEPEST = 100


class ChatTemplate(Record):
    """A chat template, and where it came from."""

    text: str
    source: str

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return a conversation as one text.

        `tools` are JSON schemas, or functions with types and a docstring; `variables` are further
        values for the template, such as `enable_thinking`. Raises `ConfigurationError` if the
        template refuses the messages, with the template's own message.
        """
        if not all(isinstance(document, Mapping) for document in documents or ()):
            raise ConfigurationError(
                "documents are dicts such as {'title': 'Rivers', 'text': 'The Rhine …'}",
                source="documents",
            )
        given = {
            **_plain(variables, "variables"),
            "messages": _messages(messages),
            "tools": None if tools is None else _plain(list(map(tool_schema, tools)), "tools"),
            "documents": None if documents is None else _plain(list(documents), "documents"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        outcome = _ask({"template": self.text, "variables": given})
        kind, text = outcome.answer if outcome.how == "answered" else (outcome.how, outcome.error)
        if kind == "rendered":
            return str(text)
        if kind == "missing":
            raise UnsupportedError(str(text))
        if kind == "not_started":
            raise UnsupportedError(f"no process for chat templates can be started: {text}")
        raise ConfigurationError(self._sentence(kind, shortened(str(text), 400)), self.source)

    def _sentence(self, kind: str, text: str) -> str:
        name = f"the chat template of {self.source}"
        if kind == "refused":
            return f"{name} refuses these messages: {text}"
        if kind == "syntax":
            return f"{name} is damaged: {text}"
        if kind == "memory" or (kind == "crashed" and text in ("SIGKILL", "SIGABRT")):
            return f"{name} took more than {MEMORY // 2**20} MiB of memory, and was stopped"
        if kind == "timed_out":
            return f"{name} took more than {SECONDS:g} s, and was stopped"
        if kind in ("long", "endless_output"):
            return f"{name} wrote more than {LONGEST} characters, and was stopped"
        return f"{name} cannot write these messages: {text}"


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, Mapping | str) or not isinstance(messages, Sequence) or not messages:
        raise ConfigurationError(
            "messages are a list of dicts such as {'role': 'user', 'content': 'Hello'}, at least "
            f"one, not {shortened(repr(messages))}",
            source="messages",
        )
    plain = [_plain(message, f"messages[{place}]") for place, message in enumerate(messages)]
    for place, message in enumerate(plain):
        if not isinstance(message, dict):
            raise ConfigurationError(
                f"messages[{place}] is not a dict such as {{'role': 'user', 'content': 'Hello'}}: "
                f"{shortened(repr(message))}",
                source=f"messages[{place}]",
            )
        # Under each name that templates use.
        reasons = [message[key] for key in _REASONING if message.get(key) is not None]
        if reasons:
            plain[place] = {"thinking": reasons[0], **message, "reasoning_content": reasons[0]}
    return plain


def refuse_images(messages: Sequence[Any]) -> None:
    """Raise `UnsupportedError` for a message with a part that is not text."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else ()
        kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
        other = next((kind for kind in kinds if kind != "text"), None)
        if other is not None:
            raise UnsupportedError(
                f"a message has a part of type {other!r}, and only text is read here; transformers "
                "(AutoModelForImageTextToText) and vLLM read images and sound"
            )


def _plain(value: Any, path: str, depth: int = 0) -> Any:
    """Return the value converted to plain types: a template gets no object of the program."""
    if value is None or isinstance(value, bool):
        return value
    if depth > _DEEPEST:
        raise ConfigurationError(f"{path} is nested more than {_DEEPEST} levels deep", path)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_key(k, path): _plain(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        inner = [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return tuple(inner) if isinstance(value, tuple) else inner
    if is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        return _plain(values, path, depth + 1)
    if callable(dumped := getattr(value, "model_dump", None)):  # a pydantic model
        return _plain(dumped(), path, depth + 1)
    raise ConfigurationError(
        f"{path} is of type {type(value).__name__}: a chat template takes text, numbers, booleans, "
        "None, lists, dicts and dataclasses",
        source=path,
    )


def _key(key: Any, path: str) -> Any:
    if key is None or isinstance(key, str | int | float):
        return _plain(key, path)
    raise ConfigurationError(f"{path}: the key {shortened(repr(key))} is not a text", source=path)


# --- functions of Python as tools ------------------------------------------------------------

_TYPES: dict[Any, dict[str, str]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*(?:\n|$)", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?:[ \t]*\([^)]*\))?:[ \t]*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)


def tool_schema(tool: Any) -> Mapping[str, Any]:
    """Return the JSON schema of a tool; a schema is returned unchanged.

    A function's schema comes from its name, its types and its docstring. The docstring describes
    the function and, under `Args:`, every parameter, in Google style.
    """
    if isinstance(tool, Mapping):
        return tool
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise ConfigurationError(
            f"a tool is a JSON schema or a function, not {shortened(repr(tool))}", source="tools"
        )
    return {"type": "function", "function": _describe_function(tool)}


def _describe_function(tool: Callable[..., Any]) -> dict[str, Any]:
    name = tool.__name__
    parts = _sections(inspect.getdoc(tool) or "")
    if not parts[""]:
        raise _refusal(name, "has no docstring; it tells the model what the tool does")
    descriptions = _arguments(parts.get("Args", ""))
    try:
        hints = typing.get_type_hints(tool)
    except Exception as error:
        raise _refusal(name, f"has types that cannot be read: {error}") from error
    properties, required = {}, []
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.name not in hints:
            raise _refusal(name, f"has no type for {parameter.name}")
        if parameter.name not in descriptions:
            raise _refusal(name, f"does not describe {parameter.name} under Args: in its docstring")
        schema = _of_type(hints[parameter.name], name)
        properties[parameter.name] = _with_choices(schema, descriptions[parameter.name], name)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    described = {"name": name, "description": parts[""], "parameters": parameters}
    if "return" in hints:
        returned = _of_type(hints["return"], name)
        described["return"] = returned
        if parts.get("Returns"):
            returned["description"] = parts["Returns"]
    return described


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a docstring by name; the first one has none."""
    first, *rest = _SECTION.split(text)
    return {"": first.strip()} | {
        name: inspect.cleandoc(part).strip() if name == "Args" else part.strip()
        for name, part in zip(rest[::2], rest[1::2], strict=True)
    }


def _arguments(text: str) -> dict[str, str]:
    """Return the description of each argument; a line without a name continues the one before."""
    descriptions: dict[str, str] = {}
    name = ""
    for line in filter(str.strip, inspect.cleandoc(f"\n{text}").splitlines()):
        if match := _ARGUMENT.match(line.strip()):
            name, descriptions[match[1]] = match[1], match[2].strip()
        elif name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions


def _with_choices(schema: dict[str, Any], text: str, name: str) -> dict[str, Any]:
    if choices := _CHOICES.search(text):
        try:
            given = json.loads(choices[1])
        except ValueError as error:
            raise _refusal(name, f"has choices that are not JSON: {choices[1]}") from error
        schema["enum"] = [choice.strip() if isinstance(choice, str) else choice for choice in given]
        text = text[: choices.start()].strip()
    schema["description"] = text
    return schema


def _of_type(hint: Any, name: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return dict(_TYPES.get(hint, {"type": "object"}))
    if origin in (Union, types.UnionType):
        return _of_union(inner, name)
    if origin is Literal:
        kinds = list(dict.fromkeys(_TYPES.get(type(item), {}).get("type") for item in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _of_type(inner[0], name)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(inner[1], name)}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_of_type(item, name) for item in inner]}
    raise _refusal(name, f"has a parameter of type {hint}, which JSON schemas do not have")


def _of_union(inner: tuple[Any, ...], name: str) -> dict[str, Any]:
    kinds = [_of_type(kind_hint, name) for kind_hint in inner if kind_hint is not type(None)]
    if len(kinds) == 1:
        schema = kinds[0]
    elif all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds):
        names = sorted({kind["type"] for kind in kinds})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": kinds}
    return schema | ({"nullable": True} if type(None) in inner else {})


def _refusal(name: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the tool {name} {what}; give a JSON schema instead, or fix it", source=f"tools: {name}"
    )


# --- the child process, one for all templates of this process --------------------------------


def function_child(answering: Callable[..., Any]) -> Conversation:
    """Return the child process that answers questions by a function of this package."""
    path = [entry or os.getcwd() for entry in sys.path]
    function = f"{answering.__module__}:{answering.__qualname__}"
    return Conversation("function", {"path": path, "function": function}, pause=0.0, site=True)


def ask_to_start(child: Conversation, question: Any) -> Outcome:
    """Ask with a limit for a slow start; ask again if the child was killed since the last time."""
    outcome = child.ask(question, limit=_SECONDS_TO_START)
    return child.ask(question, limit=_SECONDS_TO_START) if outcome.how == "crashed" else outcome


@lru_cache(1)
def _child() -> Conversation:
    return function_child(answering)


def _ask(question: dict[str, Any]) -> Outcome:
    # The start, slow on a busy machine, does not count toward the template's time.
    started = ask_to_start(_child(), None)
    if started.how != "answered" or started.answer is not None:
        return started
    return _child().ask(question, limit=SECONDS)


def answering(
    tell: Callable[[str], None], arguments: dict[str, Any]
) -> Callable[[Any], tuple[str, str] | None]:
    """Return, in the child, the function that renders; it answers with the outcome and the text."""
    missing = _missing()
    _limit_memory()

    def answer(question: Any) -> tuple[str, str] | None:
        if missing or question is None:
            return ("missing", missing) if missing else None
        try:
            return _render(question["template"], question["variables"])
        except MemoryError:
            return "memory", ""

    return answer


def _missing() -> str | None:
    advice = f"run: {install_command('llm')}"
    try:
        import jinja2
    except ImportError:
        return f"chat templates need the package jinja2, which is not installed; {advice}"
    if tuple(map(int, jinja2.__version__.split(".")[:3])) < (3, 1, 6):
        return f"the sandbox of jinja2 {jinja2.__version__} has known holes; {advice}"
    return None


def _limit_memory() -> None:
    """Limit this process to `MEMORY` more bytes, and let it write to no file."""
    try:
        import resource
    except ImportError:  # Windows has no such limits, only those on time and output
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))


def _render(template: str, variables: dict[str, Any]) -> tuple[str, str]:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        text = _compile(template).render(variables)
    except TemplateSyntaxError as error:
        return "syntax", f"line {error.lineno}: {error.message}"
    except _RefusedError as error:
        return "refused", str(error)
    except TemplateError as error:
        return "failed", str(error)
    except MemoryError:
        raise
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return ("long", "") if len(text) > LONGEST else ("rendered", text)


class _RefusedError(Exception):
    """Raised by a template, with its own message."""


@lru_cache(8)
def _compile(template: str) -> Any:
    return _environment().from_string(template)


@lru_cache(1)
def _environment() -> Any:
    """Return the environment that Hugging Face's libraries give to a template."""
    from jinja2 import ext, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(ext.Extension):
        """`{% generation %}` marks the assistant's text; here it renders like any other text."""

        tags = {"generation"}  # noqa: RUF012 - as in the base class

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

        def _write(self, caller: Callable[[], str]) -> str:
            return caller()

    class PublicNamespace(Namespace):
        def __init__(*args: Any, **values: Any) -> None:
            self, *rest = args
            Namespace.__init__(self)
            for name, value in dict(*rest, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace takes no private name such as {name!r}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_refuse,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dicts(),
        namespace=PublicNamespace,
    )
    return environment


class _Dicts:
    """`dict` for templates, without the other attributes of the class."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models see it; jinja2's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: Any) -> NoReturn:
    raise _RefusedError(message)
