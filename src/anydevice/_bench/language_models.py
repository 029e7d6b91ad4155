"""The speed of a language model on its device, beside the limits of the device.

To write a token, the active weights and the cached keys and values are read once: the measured
bandwidth over these bytes limits the speed. A prompt is read at the rate of matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from anydevice import __version__
from anydevice._arrays.memory.stats import memory_stats
from anydevice._bench.measure import ceiling_of, measure_ceilings
from anydevice._bench.results import Ceiling
from anydevice._check.runners import Progress, runner
from anydevice._core.dtypes import as_dtype
from anydevice._core.record import Record
from anydevice._llm.sampling import Sampling
from anydevice._machine.engines import registry
from anydevice._plan.families import ModelShape
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice.llm import LanguageModel

CEILING_LIMIT = 0.1
"""Seconds for one workload of a ceiling."""
WRITTEN = 32
"""Tokens that are written after each prompt."""
_STEP = 7919
"""Distance between the tokens of a prompt: a prime."""


class TextSpeed(Record):
    """The speed of reading a prompt of `context` tokens and of writing `written` tokens.

    `prefill` and `decode` are tokens a second, `first_token` is the time to the first token in
    seconds. The limits follow from the ceilings of the device; `None` if unknown.
    """

    context: int
    written: int
    prefill: float
    first_token: float
    decode: float
    prefill_limit: float | None
    decode_limit: float | None


class TextSpeeds(Record):
    """The ceilings of a device, a speed for each context, and the peak memory if known."""

    version: str
    ceilings: tuple[Ceiling, ...]
    speeds: tuple[TextSpeed, ...]
    peak: int | None = None


def bench_text(
    model: LanguageModel,
    contexts: Sequence[int],
    *,
    written: int = WRITTEN,
    repeats: int = 3,
    ceilings: Sequence[Ceiling] | None = None,
    progress: Progress | None = None,
) -> TextSpeeds:
    """Measure a loaded model with prompts of these lengths; each figure is a median.

    The first run of each length compiles and does not count. The `ceilings` of the device are
    measured unless they are given; without any, there are no limits.

    Raises `ConfigurationError` for a prompt that leaves no room in the context for the reply.
    """
    if written < 2:
        raise ConfigurationError(
            f"measuring the speed of generation takes at least 2 tokens, not {written}",
            "written",
        )
    for length in contexts:
        if not 0 < length <= model.context - written:
            raise ConfigurationError(
                f"a prompt of {length} tokens and a reply of {written} do not fit into the model's "
                f"context of {model.context}; load it with a larger one",
                "context",
            )
    tell = progress or (lambda done, total, doing: None)
    steps = len(contexts) * (repeats + 1) + 1
    assert model.device.engine is not None
    registry.load(model.device.engine).memory.reset_peak(model.device)
    runs = []
    for number, length in enumerate(contexts):
        for repeat in range(repeats + 1):
            tell(number * (repeats + 1) + repeat, steps, f"a prompt of {length:,} tokens")
            runs.append(_run(model, length, written))
    peak = memory_stats(model.device).peak
    if ceilings is None:
        tell(steps - 1, steps, "ceilings")
        assert model.device.engine is not None
        here = runner(model.device, model.device.engine)
        ceilings, _ = measure_ceilings([here], [model.dtype], limit=CEILING_LIMIT, quick=True)
    speeds = []
    for number, length in enumerate(contexts):
        first = number * (repeats + 1) + 1
        speeds.append(_speed(model, length, written, runs[first : first + repeats], ceilings))
    return TextSpeeds(__version__, tuple(ceilings), tuple(speeds), peak)


def _run(model: LanguageModel, length: int, written: int) -> tuple[float, float]:
    """Return the seconds to the first token, and of each later one; no token ends the reply."""
    prompts = [prompt_of(length, model.description.vocabulary)]
    began = time.perf_counter()
    steps = model.steps(prompts, Sampling(), written)
    next(steps)
    first = time.perf_counter()
    for _ in steps:
        pass
    last = time.perf_counter()
    return first - began, (last - first) / (written - 1)


def prompt_of(length: int, vocabulary: int) -> list[int]:
    """Return a prompt of distinct tokens: equal ones would all choose the same experts.

    >>> prompt_of(4, 1000)
    [0, 919, 838, 757]
    """
    return [number * _STEP % vocabulary for number in range(length)]


def _speed(
    model: LanguageModel,
    length: int,
    written: int,
    runs: Sequence[tuple[float, float]],
    ceilings: Sequence[Ceiling],
) -> TextSpeed:
    to_first, per_token = (median(times) for times in zip(*runs, strict=True))
    shape, device = model.plan.estimate.shape, str(model.device)
    assert shape is not None
    read = ceiling_of(ceilings, device, "read")
    product = ceiling_of(ceilings, device, "matmul", model.dtype)
    middle = length + written // 2
    return TextSpeed(
        context=length,
        written=written,
        prefill=length / to_first,
        first_token=to_first,
        decode=1 / per_token,
        prefill_limit=product.rate * length / operations_of(shape, length) if product else None,
        decode_limit=read.rate / bytes_of(shape, middle, model.dtype) if read else None,
    )


def bytes_of(shape: ModelShape, context: int, dtype: str) -> int:
    """Return the bytes that one token reads: active weights, keys and values."""
    size = as_dtype(dtype).itemsize
    return _active_parameters(shape) * size + sum(shape.kv_bytes(context, dtype=dtype))


def operations_of(shape: ModelShape, length: int) -> int:
    """Return the operations of a prompt's matrix products; the head computes one token alone."""
    head = shape.vocabulary * shape.hidden
    attended = sum(
        length * (length if window is None else min(window, length)) for window in shape.windows
    )
    scores = attended // 2 * shape.heads * shape.head_size * 2
    return 2 * ((_active_parameters(shape) - head) * length + head + scores)


def _active_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that one token uses: chosen experts, one embedding row."""
    unread = 0 if shape.tied_embeddings else shape.embedding_parameters
    if shape.experts is not None:
        idle = shape.experts.count - shape.experts.per_token
        matrices = 3 if shape.build.gated else 2
        expert_size = matrices * shape.hidden * shape.experts.intermediate
        unread += len(shape.experts.layers) * idle * expert_size
    return shape.parameters - unread
