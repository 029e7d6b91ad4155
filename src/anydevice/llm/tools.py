"""Functions of Python described to a model: the JSON schema of a tool."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from anydevice.core.text import shortened
from anydevice.errors import ConfigurationError

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
    """The JSON schema of a tool; one that is given as a schema stays as it is.

    Of a function, its name, types and docstring are the schema. The docstring describes the
    function, and under `Args:` every parameter, as in Google's style.

    >>> def weather(city: str, days: int = 1) -> str:
    ...     '''The weather of the next days.
    ...
    ...     Args:
    ...         city: where
    ...         days: how many
    ...     '''
    >>> schema = tool_schema(weather)["function"]
    >>> schema["name"], schema["description"], schema["parameters"]["required"]
    ('weather', 'The weather of the next days.', ['city'])
    >>> schema["parameters"]["properties"]["days"]
    {'type': 'integer', 'description': 'how many'}
    """
    if isinstance(tool, Mapping):
        return tool
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise ConfigurationError(
            f"a tool is a JSON schema or a function, not {shortened(repr(tool))}", source="tools"
        )
    return {"type": "function", "function": _described(tool)}


def _described(tool: Callable[..., Any]) -> dict[str, Any]:
    name = tool.__name__
    parts = _sections(inspect.getdoc(tool) or "")
    if not parts[""]:
        raise _refusal(name, "has no docstring; it tells the model what the tool does")
    told = _arguments(parts.get("Args", ""))
    try:
        hints = typing.get_type_hints(tool)
    except Exception as error:
        raise _refusal(name, f"has types that cannot be read: {error}") from error
    properties, required = {}, []
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.name not in hints:
            raise _refusal(name, f"has no type for {parameter.name}")
        if parameter.name not in told:
            raise _refusal(name, f"does not describe {parameter.name} under Args: in its docstring")
        schema = _of_type(hints[parameter.name], name)
        properties[parameter.name] = _with_choices(schema, told[parameter.name], name)
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
    """The parts of a docstring by name; that before the first has none."""
    first, *rest = _SECTION.split(text)
    return {"": first.strip()} | {
        name: inspect.cleandoc(part).strip() if name == "Args" else part.strip()
        for name, part in zip(rest[::2], rest[1::2], strict=True)
    }


def _arguments(text: str) -> dict[str, str]:
    """What is told of each argument; a line that names none goes on with the one before."""
    found: dict[str, str] = {}
    name = ""
    for line in filter(str.strip, inspect.cleandoc(f"\n{text}").splitlines()):
        if match := _ARGUMENT.match(line.strip()):
            name, found[match[1]] = match[1], match[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _with_choices(schema: dict[str, Any], text: str, name: str) -> dict[str, Any]:
    if choices := _CHOICES.search(text):
        try:
            given = json.loads(choices[1])
        except ValueError as error:
            raise _refusal(name, f"has choices that are not JSON: {choices[1]}") from error
        schema["enum"] = [each.strip() if isinstance(each, str) else each for each in given]
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
        kinds = list(dict.fromkeys(_TYPES.get(type(each), {}).get("type") for each in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _of_type(inner[0], name)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(inner[1], name)}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_of_type(each, name) for each in inner]}
    raise _refusal(name, f"has a parameter of type {hint}, which JSON schemas do not have")


def _of_union(inner: tuple[Any, ...], name: str) -> dict[str, Any]:
    kinds = [_of_type(each, name) for each in inner if each is not type(None)]
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
