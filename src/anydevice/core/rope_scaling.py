"""Frequencies of rotary position embeddings, and their scaling for longer contexts.

Computed on the host with Python's own numbers: they are few, and must be exact, because a position
multiplies their error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from anydevice.errors import ConfigurationError

Scaling = Mapping[str, Any]
Frozen = tuple[str | None, ...]

_TEXTS = ("rope_type", "type")

_KEYS = (
    *_TEXTS,
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
)


def freeze(scaling: Scaling | None) -> Frozen:
    """What matters of a scaling, as something that can be a key: numbers are exact texts.

    >>> freeze(None), freeze({"rope_type": "linear", "factor": 2})[:5]
    ((), ('linear', None, None, None, '0x1.0000000000000p+1'))
    """
    if scaling is None:
        return ()
    return tuple([_as_text(key, scaling.get(key)) for key in _KEYS])


def thaw(frozen: Frozen) -> Scaling | None:
    """The scaling that was frozen, without what does not matter."""
    if not frozen:
        return None
    given = {key: text for key, text in zip(_KEYS, frozen, strict=True) if text is not None}
    return {key: text if key in _TEXTS else float.fromhex(text) for key, text in given.items()}


def frequencies(size: int, theta: float, scaling: Scaling | None) -> tuple[list[float], float]:
    """The angle of each pair of elements for one step, and the factor of cosine and sine.

    Raises `ConfigurationError` if the scaling is of no kind that is known, or lacks a number, or
    has one that makes no sense.

    >>> frequencies(4, 10000.0, None)
    ([1.0, 0.01], 1.0)
    >>> frequencies(4, 10000.0, {"rope_type": "linear", "factor": 2.0})
    ([0.5, 0.005], 1.0)
    """
    if not 0 < theta < math.inf:
        raise _wrong(f"theta is a number above 0, but it is {theta}")
    plain = [theta ** (-2 * pair / size) for pair in range(size // 2)]
    if scaling is None:
        return plain, 1.0
    said = _number(scaling, "rope_theta", theta)
    if said != theta:
        raise _wrong(f"theta is {theta}, but scaling says rope_theta {said}; give theta={said}")
    if _number(scaling, "partial_rotary_factor", 1.0) != 1:
        raise _wrong("x is rotated whole; give only the part of it that partial_rotary_factor says")
    return _SCALED[kind_of(scaling)](plain, theta, scaling)


def kind_of(scaling: Scaling) -> str:
    """Which of the known kinds a scaling is."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in _SCALED:
        raise _wrong(f"there is no rope_type {kind!r}; the kinds are {', '.join(_SCALED)}")
    return kind


def refuse_scaling(scaling: Any) -> None:
    """Raise `ConfigurationError` for what is no scaling, or one of no kind that is known."""
    if not isinstance(scaling, Mapping):
        kind = type(scaling).__name__
        raise _wrong(
            f"scaling is a mapping such as {{'rope_type': 'linear', 'factor': 2.0}}, "
            f"but it is a {kind}"
        )
    kind_of(scaling)


def _default(plain: list[float], theta: float, scaling: Scaling) -> tuple[list[float], float]:
    return plain, 1.0


def _linear(plain: list[float], theta: float, scaling: Scaling) -> tuple[list[float], float]:
    factor = _number(scaling, "factor")
    return [frequency / factor for frequency in plain], 1.0


def _llama3(plain: list[float], theta: float, scaling: Scaling) -> tuple[list[float], float]:
    """Slow turns are stretched, fast ones kept, those between take some of both."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    context = _number(scaling, "original_max_position_embeddings")
    if low >= high:
        raise _wrong(
            "'low_freq_factor' of the scaling is less than 'high_freq_factor', "
            f"but they are {low:g} and {high:g}"
        )

    def stretched(frequency: float) -> float:
        turns = context * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - kept) * frequency / factor + kept * frequency

    return [stretched(frequency) for frequency in plain], 1.0


def _yarn(plain: list[float], theta: float, scaling: Scaling) -> tuple[list[float], float]:
    """As in "YaRN: Efficient Context Window Extension of Large Language Models"."""
    factor = _number(scaling, "factor")
    context = _number(scaling, "original_max_position_embeddings")
    size = 2 * len(plain)
    if theta <= 1:
        raise _wrong(f"scaling of rope_type 'yarn' needs a theta above 1, but it is {theta:g}")

    def pair_with(turns: float) -> float:
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_with(_number(scaling, "beta_fast", 32.0))
    last = pair_with(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    span = last - first or 0.001

    def stretched(pair: int) -> float:
        share = min(max((pair - first) / span, 0.0), 1.0)
        return plain[pair] / factor * share + plain[pair] * (1 - share)

    return [stretched(pair) for pair in range(len(plain))], _yarn_factor(scaling, factor)


def _yarn_factor(scaling: Scaling, factor: float) -> float:
    def magnified(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    # Models that have no such factor say 0.
    if not scaling.get("mscale") or not scaling.get("mscale_all_dim"):
        return magnified(1.0)
    return magnified(_number(scaling, "mscale")) / magnified(_number(scaling, "mscale_all_dim"))


_SCALED: dict[str, Callable[[list[float], float, Scaling], tuple[list[float], float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _number(scaling: Scaling, key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    if value is None:
        value = default
    if value is None:
        raise _wrong(f"scaling of rope_type {kind_of(scaling)!r} needs {key!r}, a number above 0")
    number = _as_number(key, value)
    if not 0 < number < math.inf:
        raise _wrong(f"{key!r} of the scaling is a number above 0, but it is {value!r}")
    return number


def _as_text(key: str, value: Any) -> str | None:
    # PyTorch's compiler takes a number that changes for a variable, but not its digits.
    if value is None or (key in _TEXTS and isinstance(value, str)):
        return value
    return _as_number(key, value).hex()


def _as_number(key: str, value: Any) -> float:
    if isinstance(value, str):
        raise _not_a_number(key, value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise _not_a_number(key, value) from error


def _not_a_number(key: str, value: Any) -> ConfigurationError:
    return _wrong(f"{key!r} of the scaling is a number, but it is {value!r}")


def _wrong(what: str) -> ConfigurationError:
    return ConfigurationError(f"rope: {what}", source="rope")
