"""A conversation with a language model in the terminal: turns, commands, and Ctrl-C.

Ctrl-C stops the reply and not the program; what was written so far stays in the conversation. A
second one interrupts whatever runs, for a model that does not get to its next word.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT
from importlib import import_module
from typing import TYPE_CHECKING, Any

from anydevice.cli.printing import Output, complain
from anydevice.core.files import expanded, write_whole
from anydevice.core.text import format_time
from anydevice.errors import AnyDeviceError, ConfigurationError

if TYPE_CHECKING:
    from anydevice.llm import LanguageModel, Reply, Stream

_PROMPT, _CONTINUED = "> ", ". "
_HELP = (
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
"""What is said of a reply that did not end by itself."""


class Chat:
    """A model, how it is sampled, and the messages so far.

    What the options leave open is as the model's own `generation_config.json` says.

    Without a chat template there are no messages: each text is completed by itself.
    """

    def __init__(
        self, model: LanguageModel, options: dict[str, Any], system: str | None = None
    ) -> None:
        self.model = model
        self.options = {**getattr(model, "generation_defaults", {}), **options}
        self.has_template = bool(getattr(model.tokenizer, "templates", None))
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
        """The next turn, as `generate` and `stream` take it."""
        return [*self.messages, _message("user", text)] if self.has_template else text

    def keep(self, text: str, reply: str) -> None:
        """Add a turn to the messages; one without a reply is forgotten."""
        if reply:
            self.messages += [_message("user", text), _message("assistant", reply)]

    def stream(self, text: str) -> Stream:
        """The reply to a text, piece by piece."""
        return self.model.stream(self.question(text), **self.options)


class Conversation:
    """The turns of a terminal. `notes` is where something is said about them."""

    def __init__(self, chat: Chat, output: Output, notes: Output) -> None:
        self._chat, self._output, self._notes = chat, output, notes

    def run(self) -> int:
        """Take turns until the input ends; the exit code is 0."""
        with suppress(ImportError):  # Windows: its terminal edits lines and keeps them
            import_module("readline")  # now input() edits lines, and keeps them
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
        pieces = self._chat.stream(text)
        with _stopping() as stopped:
            try:
                for piece in pieces:
                    self._output.write(piece)
                    if stopped():
                        break
            except KeyboardInterrupt:
                pass  # the second one: stopped as well
            pieces.close()
        self._output.write("\n")
        return pieces.reply

    def _command(self, name: str, rest: str) -> None:
        if name == "/help":
            self._notes.say(*_HELP)
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
            text = _as_text(messages)
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
        """What was typed, `None` at the end of the input."""
        lines: list[str] = []
        while not lines or lines[-1].endswith("\\"):
            try:
                line = self._typed(_CONTINUED if lines else _PROMPT)
            except EOFError:
                return None
            except UnicodeDecodeError as error:
                complain(f"what was typed is not {error.encoding}")
                lines = [""]
                break
            except KeyboardInterrupt:
                self._notes.write("\n")
                self._note("Ctrl-D or /exit ends.")
                lines.clear()
                continue
            lines.append(line.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        return "\n".join(line.removesuffix("\\") for line in lines)

    def _typed(self, prompt: str) -> str:
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
    """How many tokens a reply has, how fast they came, and why it ended, if not by itself."""
    count, speed = len(reply.tokens), reply.speed
    parts = [f"{count} token{'' if count == 1 else 's'}"]
    if speed.decode:
        parts.append(f"{speed.decode:.1f} tokens/s")
    if speed.first_token:
        parts.append(f"the first after {format_time(speed.first_token)}")
    if reply.ended in _ENDINGS:
        parts.append(_ENDINGS[reply.ended])
    return f"[{', '.join(parts)}]"


def _as_text(messages: list[dict[str, str]]) -> str:
    return "\n\n".join(f"{each['role']}: {each['content']}" for each in messages) + "\n"


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """A block that is asked to stop by Ctrl-C: whether it was is what the function tells.

    Only a second Ctrl-C raises `KeyboardInterrupt`. One that is ignored outside stays ignored.
    """
    asked: list[int] = []

    def handle(number: int, _: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN
    if here:
        signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(asked)
    finally:
        if here:
            signal.signal(signal.SIGINT, before)
