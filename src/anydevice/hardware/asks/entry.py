"""The child's side of a question to a driver: run as a script, standard library only.

Started as `python -I -S entry.py FILE ARGUMENTS`: FILE is a module without its `.py`, ARGUMENTS a
dict. What the module's `ask(tell, arguments)` returns is written as the last line, after a line
for every step it announced with `tell("…")`: if the driver then takes the process down, the
parent knows in which step. Whatever the driver itself prints goes elsewhere.

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


def load_ask(file: str) -> Any:
    """The module at `FOLDER/PACKAGE/NAME`, without leaving FOLDER on the import path."""
    package, name = os.path.split(file)
    folder, package = os.path.split(package)
    sys.path.insert(0, folder)
    try:
        return getattr(__import__(f"{package}.{name}"), name)
    finally:
        sys.path.remove(folder)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)

    def write(kind: str, content: Any) -> None:
        os.write(answers, f"{kind} {marshal.dumps(content).hex()}\n".encode())

    try:
        ask = load_ask(sys.argv[1]).ask
        answer = ask(lambda step: write("step", step), marshal.loads(bytes.fromhex(sys.argv[2])))
    except Exception as error:
        write("error", f"{type(error).__name__}: {error}")
    else:
        write("answer", answer)
    sys.stderr.flush()
    # Drivers have crashed in their own exit handlers after answering well.
    os._exit(0)


if __name__ == "__main__":
    main()
