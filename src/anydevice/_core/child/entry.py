"""The child process: runs one module as a script, with the standard library only.

Started as `python -I -S entry.py FILE ARGUMENTS`: FILE is a module without its `.py`, ARGUMENTS a
dict. The module's `ask(tell, arguments)` announces each step with `tell("…")`, one line each; if a
driver kills the process, the parent knows the step. The result is the last line. The driver's own
output goes to the error stream.

With a third argument, `stay`, the module's `serve(tell, arguments)` returns a function. It answers
every line of the standard input in the same way, until the input ends.

Both sides are the same interpreter, so `marshal` carries the data: it needs no import, while
`json` would take longer to import than most drivers take to answer.
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def module_at(file: str) -> Any:
    """Return the module at `FOLDER/PACKAGE/NAME`, without leaving FOLDER on the import path."""
    package, name = os.path.split(file)
    folder, package = os.path.split(package)
    sys.path.insert(0, folder)
    try:
        return getattr(__import__(f"{package}.{name}"), name)
    finally:
        sys.path.remove(folder)


def _server(file: str, tell: Any, arguments: Any) -> Any:
    """Return the function that answers questions; it loads the module with the first one."""
    started: list[Any] = []

    def serve(question: Any) -> Any:
        if not started:
            started.append(module_at(file).serve(tell, arguments))
        return started[0](question)

    return serve


def end_with_parent() -> None:
    """End this process when its standard input closes, as it does when its parent ends."""
    import _thread
    import select

    def watch() -> None:
        closing = select.poll()
        closing.register(0, 0)  # waits for no data: only the end of the other side is reported
        closing.poll()
        os._exit(0)

    try:
        _thread.start_new_thread(watch, ())
    except RuntimeError:  # no thread is left: the parent's time limit still ends this process
        pass


def main() -> None:
    if os.name == "posix":
        end_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)

    def write(kind: str, content: Any) -> None:
        os.write(answers, f"{kind} {marshal.dumps(content).hex()}\n".encode())

    def tell(step: str) -> None:
        write("step", step)

    def answer(function: Any, *questions: Any) -> None:
        try:
            content = function(*questions)
        except Exception as error:
            write("error", f"{type(error).__name__}: {error}")
        else:
            write("answer", content)

    arguments = marshal.loads(bytes.fromhex(sys.argv[2]))
    if sys.argv[3:] == ["stay"]:
        serve = _server(sys.argv[1], tell, arguments)
        for line in sys.stdin.buffer:
            answer(serve, marshal.loads(bytes.fromhex(line.decode("ascii"))))
    else:
        answer(lambda: module_at(sys.argv[1]).ask(tell, arguments))
    sys.stderr.flush()
    # Some drivers crash in their exit handlers after a correct answer.
    os._exit(0)


if __name__ == "__main__":
    main()
