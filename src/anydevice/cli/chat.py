"""`anydevice chat`: a conversation with a language model in the terminal, or one for a script.

Replies go to standard output. Remarks on them go there too in a conversation, and to standard error
otherwise, so that a script gets the text alone.

Ctrl-C stops the reply and not the program; the text so far stays in the conversation. While the
prompt is read, it interrupts that; a second Ctrl-C interrupts whatever runs, for a model that does
not get to its next word. While a model is loaded, and for a script, Ctrl-C ends the program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT
from typing import TYPE_CHECKING, Any

from anydevice._core.files import expanded, write_whole
from anydevice._core.signals import handling
from anydevice._core.text import format_time
from anydevice._plan.config import locate
from anydevice.cli.loading import load_model
from anydevice.cli.main import INTERRUPTED
from anydevice.cli.options import Option, add_filters, add_options, check_place, count
from anydevice.cli.printing import Output, complain, output_on
from anydevice.errors import AnyDeviceError, ConfigurationError

if TYPE_CHECKING:
    from anydevice.llm import LanguageModel, Reply, ReplyStream

EXAMPLE = 'anydevice chat path/to/model --prompt "What is a GPU?" --max-tokens 100 --json'

_NO_TEMPLATE = "It has no chat template: it completes text, each line by itself."
_SAMPLING: tuple[Option, ...] = (
    ("--temperature", "NUMBER", float, "0 takes the likeliest token each time"),
    ("--top-k", "COUNT", int, "only this many likeliest tokens"),
    ("--top-p", "SHARE", float, "only the likeliest tokens that make up this share"),
    ("--min-p", "SHARE", float, "only tokens at least this likely beside the likeliest"),
    ("--repetition-penalty", "NUMBER", float, "above 1: tokens that were there become less likely"),
    ("--seed", "INTEGER", int, "the same seed gives the same text (a new one each time)"),
)
USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Sampling defaults of llama.cpp, for models whose files have none."""
_PROMPT, _CONTINUED = "> ", ". "
HELP = (
    "  /reset      forget the conversation and begin anew",
    "  /save FILE  write the conversation: JSON if FILE ends in .json, else text",
    "  /help       this list",
    "  /exit       leave, as Ctrl-D does",
    "",
    "Ctrl-C stops a reply. A line that ends in \\ goes on in the next one. "
    "To send a line that begins with /, put a space before it.",
)

_ENDINGS = {
    "length": "cut off at --max-tokens or the end of the context",
    "interrupted": "stopped",
}
"""Remarks on replies that did not end by themselves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "the folder of a model, a GGUF file, or the name of a model in the Hugging Face cache"
    parser.add_argument("model", metavar="MODEL", help=model)
    prompt = "one reply to this and no conversation; - reads standard input, as a pipe does"
    longest = "the longest reply (to the end of the context; without a chat template 200)"
    add_options(
        parser,
        ("--prompt", "TEXT", str, prompt),
        ("--system", "TEXT", str, "the system message: how to answer"),
        ("--engine", "ENGINE", str, "the array library, such as torch"),
        ("--dtype", "DTYPE", str, "of the weights, such as bfloat16"),
        ("--context", "TOKENS", count, "of prompt and reply together, such as 8192 or 32k"),
        ("--max-tokens", "TOKENS", count, longest),
        *_SAMPLING,
    )
    add_filters(parser, "device")
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", help="end the reply here; may be repeated"
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Chat, or give one reply."""
    check_place(arguments.device, arguments.engine)
    locate(arguments.model)  # a missing model is an error before a missing prompt
    prompt = _prompt(arguments)
    notes = output if prompt is None and output.width is not None else output_on(sys.stderr)
    options = _options(arguments)
    with _leaving():
        loaded = load_model(
            arguments.model,
            arguments.device,
            arguments.engine,
            dtype=arguments.dtype,
            context=arguments.context,
            silent=arguments.json,
        )
        chat = Chat(loaded.model, options, arguments.system)
        if arguments.json:
            reply = chat.model.generate(chat.question(prompt or ""), **chat.options)
            output.json(reply.to_dict() | {"template": chat.has_template} | loaded.facts())
            return 0
        for line in loaded.lines():
            notes.say(notes.paint(line, "dim"))
        if not chat.has_template:
            notes.say(notes.paint(_NO_TEMPLATE, "dim"))
        if prompt is not None:
            stream = chat.stream(prompt)
            for piece in stream:
                output.write(piece)
            output.write("\n")
            notes.say(notes.paint(described(stream.reply), "dim"))
            return 0
    return Dialogue(chat, output, notes).run()


def _prompt(arguments: argparse.Namespace) -> str | None:
    """Return the single prompt of a script; `None` for a conversation in a terminal."""
    prompt: str | None = arguments.prompt
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        if arguments.json:
            raise ConfigurationError(
                "--json is for one reply: give --prompt, or pipe the prompt in", "--json"
            )
        return None
    if prompt in (None, "-"):
        prompt = _standard_input()
    if not prompt:
        raise ConfigurationError(
            "the prompt is empty: give --prompt, or pipe one in, or start in a terminal", "--prompt"
        )
    return prompt


def _standard_input() -> str:
    if sys.stdin is None:
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"standard input is not UTF-8: {error}", "--prompt") from error
    return text.removesuffix("\n").removesuffix("\r")


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of `generate`; raise for wrong ones before a model is loaded."""
    from anydevice._llm.sampling import sampling
    from anydevice._llm.text import stop_strings

    names = [name[2:].replace("-", "_") for name, *_ in _SAMPLING]
    values = vars(arguments)
    options = {n: values[n] for n in (*names, "max_tokens", "stop") if values[n] is not None}
    sampling(**{name: value for name, value in options.items() if name in names})
    stop_strings(arguments.stop)
    return options


class Chat:
    """A model, its sampling options or those of its files or `USUAL`, and the messages so far."""

    def __init__(
        self, model: LanguageModel, options: dict[str, Any], system: str | None = None
    ) -> None:
        self.model = model
        self.has_template = bool(model.tokenizer.templates)
        longest = {"max_tokens": model.context} if self.has_template else {}
        self.options = {**longest, **(model.generation_defaults or USUAL), **options}
        if system is not None and not self.has_template:
            raise ConfigurationError(
                "--system is for a model that chats, and this one has no chat template", "--system"
            )
        self._first = [] if system is None else [_message("system", system)]
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._first)

    def question(self, text: str) -> Any:
        """Return the next turn, as `generate` and `stream` take it."""
        return [*self.messages, _message("user", text)] if self.has_template else text

    def keep(self, text: str, reply: str) -> None:
        """Add a turn to the messages; one without a reply is forgotten."""
        if reply:
            self.messages += [_message("user", text), _message("assistant", reply)]

    def stream(self, text: str) -> ReplyStream:
        """Yield the reply to a text, piece by piece."""
        return self.model.stream(self.question(text), reuse=True, **self.options)


class Dialogue:
    """A conversation in a terminal; remarks on it go to `notes`."""

    def __init__(self, chat: Chat, output: Output, notes: Output) -> None:
        self._chat, self._output, self._notes = chat, output, notes

    def run(self) -> int:
        """Take turns until the input ends; the exit code is 0."""
        with suppress(ImportError):  # Windows: its terminal edits lines and keeps them
            import readline  # noqa: F401 - now input() edits lines, and keeps them
        self._note("/help lists commands, Ctrl-C stops a reply, Ctrl-D ends.")
        while (line := self._line()) is not None:
            name, _, rest = line.partition(" ")
            if name in ("/exit", "/quit"):
                return 0
            if name.startswith("/"):
                self._command(name, rest.strip())
            elif line.strip():
                self._turn(line.strip() if self._chat.has_template else line)
        self._notes.write("\n")
        return 0

    def _turn(self, text: str) -> None:
        try:
            reply = self._reply(text)
        except AnyDeviceError as error:
            self._output.complain(error)
            if len(self._chat.messages) > 1:
                self._note("/reset begins a new conversation.")
            return
        self._chat.keep(text, reply.text)
        self._note(described(reply))

    def _reply(self, text: str) -> Reply:
        """Print the reply as it is written, until it ends or Ctrl-C."""
        stopping = _Stopping()
        with handling({"SIGINT": stopping.handle}):
            pieces = self._chat.stream(text)
            try:
                stopping.at_once()  # reading a long prompt takes long, and nothing is written yet
                for piece in pieces:
                    stopping.later()
                    self._output.write(piece)
                    if stopping.count:
                        break
            except KeyboardInterrupt:
                pass  # stopped as well
            pieces.close()
        self._output.write("\n")
        return pieces.reply

    def _command(self, name: str, rest: str) -> None:
        if name == "/help":
            self._notes.say(*HELP)
        elif name == "/reset":
            self._chat.reset()
            self._note("A new conversation.")
        elif name == "/save" and rest:
            self._save(rest)
        elif name == "/save":
            self._note("/save FILE: which file?")
        else:
            self._note(f"{name} is not a command; /help lists them.")

    def _save(self, name: str) -> None:
        messages = self._chat.messages
        try:
            path = expanded(name)
            spoken = (f"{message['role']}: {message['content']}" for message in messages)
            text = "\n\n".join(spoken) + "\n"
            if path.suffix == ".json":
                text = json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
            if not path.parent.is_dir():
                raise FileNotFoundError(ENOENT, f"there is no folder {path.parent}")
            write_whole(path, [text.encode("utf-8")])
        except OSError as error:
            complain(f"{name} cannot be written: {error.strerror}")
        except AnyDeviceError as error:
            complain(error)
        else:
            self._note(f"{len(messages)} messages in {name}")

    def _line(self) -> str | None:
        """Read a message from the terminal; `None` at the end of the input."""
        lines: list[str] = []
        while not lines or lines[-1].endswith("\\"):
            try:
                line = self._read_line(_CONTINUED if lines else _PROMPT)
            except EOFError:
                return None
            except UnicodeDecodeError as error:
                complain(f"the input is not {error.encoding}")
                lines = [""]
                break
            except KeyboardInterrupt:
                self._notes.write("\n")
                self._note("Ctrl-D or /exit ends.")
                lines.clear()
                continue
            lines.append(line.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        return "\n".join(line.removesuffix("\\") for line in lines)

    def _read_line(self, prompt: str) -> str:
        if self._notes is self._output:
            return input(prompt)
        self._notes.write(prompt)  # standard output is a file
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _note(self, line: str) -> None:
        self._notes.say(self._notes.paint(line, "dim"))
        self._notes.stream.flush()


def described(reply: Reply) -> str:
    """Return the number of tokens of a reply, their speed, and why it was cut short, if it was."""
    number, speed = len(reply.tokens), reply.speed
    parts = [f"{number} token{'' if number == 1 else 's'}"]
    if speed.decode:
        parts.append(f"{speed.decode:.1f} tokens/s")
    if speed.first_token:
        parts.append(f"the first after {format_time(speed.first_token)}")
    if reply.ended in _ENDINGS:
        parts.append(_ENDINGS[reply.ended])
    return f"[{', '.join(parts)}]"


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class _Stopping:
    """Counts Ctrl-C in `count`; it raises at once only where it may."""

    count = 0
    _raises = False

    def at_once(self) -> None:
        """Raise from here on, and now if Ctrl-C has come before."""
        self._raises = True
        if self.count:
            raise KeyboardInterrupt

    def later(self) -> None:
        """Count in `count` from now on, instead of raising."""
        self._raises = False

    def handle(self, number: int, _: object) -> None:
        self.count += 1
        if self._raises or self.count > 1:
            raise KeyboardInterrupt


@contextmanager
def _leaving() -> Iterator[None]:
    """Let Ctrl-C end the process at once in the block: a library may not let it raise."""
    with handling({"SIGINT": lambda *_: os._exit(INTERRUPTED)}) as here:
        if not here:
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=_leave_when_told, args=(reader,), daemon=True).start()
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writer)


def _leave_when_told(reader: int) -> None:
    """End the process when the number of Ctrl-C comes through a pipe; return when it is closed."""
    while number := os.read(reader, 1):
        if number[0] == signal.SIGINT:
            os._exit(INTERRUPTED)
    os.close(reader)
