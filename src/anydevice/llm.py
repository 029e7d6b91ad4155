"""Language models: load a folder, ask, and get text, on any device.

    from anydevice import llm

    model = llm.load("path/to/folder")
    print(model.generate("Once upon a time", max_tokens=50).text)

Every name loads when it is first used.
"""

from __future__ import annotations

from anydevice._core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice._llm.model import LanguageModel as LanguageModel
    from anydevice._llm.model import Reply as Reply
    from anydevice._llm.model import ReplyStream as ReplyStream
    from anydevice._llm.model import Score as Score
    from anydevice._llm.model import Speed as Speed
    from anydevice._llm.model import load as load
    from anydevice._llm.quantize import QuantizedFile as QuantizedFile
    from anydevice._llm.quantize import quantize as quantize

__all__, __getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "_llm.model": "LanguageModel Reply ReplyStream Score Speed load",
        "_llm.quantize": "QuantizedFile quantize",
    },
)
