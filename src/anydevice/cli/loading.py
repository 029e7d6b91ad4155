"""Loading a language model for a command, and saying where it is, why there, and what it takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from anydevice._core.record import Record
from anydevice._core.text import format_count, format_size
from anydevice._machine.choose.scope import device, why
from anydevice._machine.discovery.discover import discover
from anydevice._plan.config import locate
from anydevice._plan.estimates import PARTS
from anydevice._report.choice import because, unmet_wishes
from anydevice.cli.options import check_place
from anydevice.errors import AnyDeviceWarning

if TYPE_CHECKING:
    from anydevice.llm import LanguageModel


class Loaded(Record):
    """A model on its device: why it is there, and which wishes for another were not met."""

    model: LanguageModel
    reason: str
    unmet: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield the model, its device, the reason of that choice, and its memory."""
        model, estimate = self.model, self.model.plan.estimate
        size = f"{format_count(estimate.parameters)} parameters in {model.dtype}"
        yield f"{model.name}: {size}, a context of {model.context:,} tokens"
        yield f"On {model.device} with {model.executor}, because {self.reason}."
        yield from (f"{sentence}." for sentence in self.unmet)
        parts = ((name.replace("_", "-"), getattr(estimate, name)) for name in PARTS)
        sizes = ", ".join(f"{name} {format_size(size)}" for name, size in parts if size)
        yield f"Memory: {format_size(estimate.total)}, of which {sizes}."

    def facts(self) -> dict[str, object]:
        """Return the same as plain data."""
        model, estimate = self.model, self.model.plan.estimate
        return {
            "model": model.name,
            "device": str(model.device),
            "engine": model.device.engine,
            "executor": model.executor,
            "reason": self.reason,
            "dtype": model.dtype,
            "context": model.context,
            "memory": {name: getattr(estimate, name) for name in (*PARTS, "total")},
        }


def load_model(
    name: str,
    devices: Sequence[str] | None,
    engine: str | None,
    *,
    dtype: str | None,
    context: int | None,
    silent: bool,
) -> Loaded:
    """Load the model of a folder or file, or of that name in the Hugging Face cache."""
    check_place(devices, engine)
    folder = locate(name)  # the machine is not looked at for a model that is nowhere
    choice = why(devices, engine=engine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyDeviceWarning)  # `Loaded` says the same
        chosen = device(devices, engine=engine)
    from anydevice import llm

    model = llm.load(
        folder, chosen, dtype=dtype, context=context, progress=False if silent else None
    )
    return Loaded(model, because(discover(), choice), tuple(unmet_wishes(choice)))
