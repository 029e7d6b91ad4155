"""Language models: load a folder, ask, and get text, on any device.

    from anydevice import llm

    model = llm.load("path/to/folder")
    print(model.generate("Once upon a time", max_tokens=50).text)

Every name loads when it is first used.
"""

from __future__ import annotations

from importlib import import_module as _import_module

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice.llm.model import LanguageModel as LanguageModel
    from anydevice.llm.model import Reply as Reply
    from anydevice.llm.model import ReplyStream as ReplyStream
    from anydevice.llm.model import Score as Score
    from anydevice.llm.model import Speed as Speed
    from anydevice.llm.model import load as load

__all__ = ["LanguageModel", "Reply", "ReplyStream", "Score", "Speed", "load"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import_module("anydevice.llm.model"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
