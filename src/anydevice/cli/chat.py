"""`anydevice chat`: a conversation with a language model in the terminal, or one for a script.

What the model writes goes to standard output. What is said about it goes there too in a
conversation, and to standard error otherwise, so that a script gets the text alone.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from anydevice.cli.conversation import Chat, Conversation, described
from anydevice.cli.loading import exit_code, load_model
from anydevice.cli.options import add_filters, count
from anydevice.cli.printing import Output, error_in_json, output_on
from anydevice.errors import AnyDeviceError, ConfigurationError

EXAMPLE = 'anydevice chat path/to/model --prompt "What is a GPU?" --max-tokens 100 --json'

_NO_TEMPLATE = "It has no chat template: it completes text, each line by itself."
_SAMPLING = (
    ("--temperature", "NUMBER", float, "0 takes the likeliest token each time"),
    ("--top-k", "COUNT", int, "only this many likeliest tokens"),
    ("--top-p", "SHARE", float, "only the likeliest tokens that make up this share"),
    ("--min-p", "SHARE", float, "only tokens at least this likely beside the likeliest"),
    ("--repetition-penalty", "NUMBER", float, "above 1: tokens that were there become less likely"),
    ("--seed", "INTEGER", int, "the same seed gives the same text (a new one each time)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, where and how it runs, the prompt of a script, and how it is sampled."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the folder of a model, a GGUF file, or the name of a model in the Hugging Face cache",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="one reply to this and no conversation; - reads standard input, as a pipe does",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message: how to answer")
    add_filters(parser, "device")
    parser.add_argument("--engine", help="the array library, such as torch")
    parser.add_argument("--dtype", metavar="DTYPE", help="of the weights, such as bfloat16")
    parser.add_argument(
        "--context",
        type=count,
        metavar="TOKENS",
        help="of prompt and reply together, such as 8192 or 32k",
    )
    parser.add_argument("--max-tokens", type=count, metavar="TOKENS", help="the longest reply")
    for name, shown, kind, text in _SAMPLING:
        parser.add_argument(name, metavar=shown, type=kind, help=text)
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", help="end the reply here; may be repeated"
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Chat; the code is 2 for bad input, and 1 where the model does not fit into memory."""
    try:
        return _chat(arguments, _prompt(arguments), output)
    except AnyDeviceError as error:
        if arguments.json:
            output.json(error_in_json(error))
        else:
            output.complain(error)
        return exit_code(error)


def _chat(arguments: argparse.Namespace, prompt: str | None, output: Output) -> int:
    notes = output if prompt is None and output.width is not None else output_on(sys.stderr)
    loaded = load_model(
        arguments.model,
        arguments.device,
        arguments.engine,
        dtype=arguments.dtype,
        context=arguments.context,
        silent=arguments.json,
    )
    chat = Chat(loaded.model, _options(arguments), arguments.system)
    if arguments.json:
        reply = chat.model.generate(chat.question(prompt or ""), **chat.options)
        output.json(reply.to_dict() | {"template": chat.has_template} | loaded.facts())
        return 0
    for line in loaded.lines():
        notes.say(notes.paint(line, "dim"))
    if not chat.has_template:
        notes.say(notes.paint(_NO_TEMPLATE, "dim"))
    if prompt is None:
        return Conversation(chat, output, notes).run()
    stream = chat.stream(prompt)
    for piece in stream:
        output.write(piece)
    output.write("\n")
    notes.say(notes.paint(described(stream.reply), "dim"))
    return 0


def _prompt(arguments: argparse.Namespace) -> str | None:
    """The one prompt of a script; `None` for a conversation in a terminal."""
    if arguments.prompt not in (None, "-"):
        return _filled(str(arguments.prompt))
    if arguments.prompt is None and sys.stdin is not None and sys.stdin.isatty():
        if arguments.json:
            raise ConfigurationError(
                "--json is for one reply: give --prompt, or pipe the prompt in", "--json"
            )
        return None
    return _filled(_standard_input())


def _standard_input() -> str:
    if sys.stdin is None:
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"standard input is not UTF-8: {error}", "--prompt") from error
    return text.removesuffix("\n").removesuffix("\r")


def _filled(prompt: str) -> str:
    if not prompt:
        raise ConfigurationError(
            "the prompt is empty: give --prompt, or pipe one in, or start in a terminal", "--prompt"
        )
    return prompt


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, by the names of `generate`; it has defaults for the others."""
    names = ["max_tokens", *(name[2:].replace("-", "_") for name, *_ in _SAMPLING), "stop"]
    given = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}
