"""Frequencies of rotary position embeddings, and their scaling for longer contexts.

Computed on the host in Python floats: they are few, and must be exact, because positions multiply
their error.

Two kinds depend on the length of the sequence. With `longrope`, frequencies are divided by
`short_factor`, a list of one number per pair, and in sequences longer than
`original_max_position_embeddings` by `long_factor`. With `dynamic`, theta grows in such sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from anydevice.errors import ConfigurationError

Scaling = Mapping[str, Any]
Frozen = tuple[str | None, ...]
Scaled = tuple[list[float], float]

_TEXTS = ("rope_type", "type")
_LISTS = ("short_factor", "long_factor")

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
    *_LISTS,
)


def freeze(scaling: Scaling | None) -> Frozen:
    """Return a scaling as a hashable key, with numbers as exact texts."""
    if scaling is None:
        return ()
    return tuple([_as_text(key, scaling.get(key)) for key in _KEYS])


def thaw(frozen: Frozen) -> Scaling | None:
    """Return the scaling that was frozen, without its unused values."""
    if not frozen:
        return None
    texts = {key: text for key, text in zip(_KEYS, frozen, strict=True) if text is not None}
    return {key: _from_text(key, text) for key, text in texts.items()}


def frequencies(
    size: int, theta: float, scaling: Scaling | None, length: float | None = None
) -> Scaled:
    """Return the angle of each pair of elements for one step, and the factor of cosine and sine.

    `length` is the length of the sequence, for kinds that depend on it; without it, the sequence
    counts as short. Raises `ConfigurationError` if the kind of scaling is unknown, or a number is
    missing or invalid.
    """
    if not 0 < theta < math.inf:
        raise _wrong(f"theta must be a number above 0, not {theta}")
    plain = [theta ** (-2 * pair / size) for pair in range(size // 2)]
    if scaling is None:
        return plain, 1.0
    base = _number(scaling, "rope_theta", theta)
    if base != theta:
        raise _wrong(f"theta is {theta}, but scaling says rope_theta {base}; give theta={base}")
    if _number(scaling, "partial_rotary_factor", 1.0) != 1:
        raise _wrong("all of x is rotated; pass only the part that partial_rotary_factor says")
    return _SCALED[kind_of(scaling)](plain, theta, scaling, length)


def kind_of(scaling: Scaling) -> str:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in _SCALED:
        raise _wrong(f"there is no rope_type {kind!r}; the kinds are {', '.join(_SCALED)}")
    return kind


def depends_on_length(scaling: Scaling | None) -> bool:
    """Whether frequencies depend on the length of the sequence.

    >>> depends_on_length({"rope_type": "longrope"}), depends_on_length({"rope_type": "linear"})
    (True, False)
    """
    return scaling is not None and kind_of(scaling) in _BY_LENGTH


def original_length(scaling: Scaling) -> float:
    """Return the length up to which a sequence counts as short."""
    return _number(scaling, "original_max_position_embeddings")


def growth_of_theta(scaling: Scaling) -> tuple[float, float]:
    """Return a and b of `dynamic`: theta grows by (a × length - b) ** (size / (size - 2)).

    >>> growth_of_theta({"rope_type": "dynamic", "factor": 4.0,
    ...                  "original_max_position_embeddings": 2})
    (2.0, 3.0)
    """
    factor = _number(scaling, "factor")
    return factor / original_length(scaling), factor - 1


def refuse_scaling(scaling: Any) -> None:
    """Raise `ConfigurationError` for anything but a scaling of a known kind."""
    if not isinstance(scaling, Mapping):
        raise _wrong(
            "scaling must be a mapping such as {'rope_type': 'linear', 'factor': 2.0}, "
            f"not a {type(scaling).__name__}"
        )
    kind_of(scaling)


def _linear(plain: list[float], theta: float, scaling: Scaling, length: float | None) -> Scaled:
    factor = _number(scaling, "factor")
    return [frequency / factor for frequency in plain], 1.0


def _llama3(plain: list[float], theta: float, scaling: Scaling, length: float | None) -> Scaled:
    """Stretch low frequencies, keep high ones, and blend those between."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    context = _number(scaling, "original_max_position_embeddings")
    if low >= high:
        raise _wrong(
            "'low_freq_factor' of the scaling must be less than 'high_freq_factor', "
            f"but they are {low:g} and {high:g}"
        )

    def stretched(frequency: float) -> float:
        turns = context * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - share) * frequency / factor + share * frequency

    return [stretched(frequency) for frequency in plain], 1.0


def _yarn(plain: list[float], theta: float, scaling: Scaling, length: float | None) -> Scaled:
    """Scale as in "YaRN: Efficient Context Window Extension of Large Language Models"."""
    factor = _number(scaling, "factor")
    context = _number(scaling, "original_max_position_embeddings")
    size = 2 * len(plain)
    if theta <= 1:
        raise _wrong(f"scaling of rope_type 'yarn' needs a theta above 1, not {theta:g}")

    def pair_with(turns: float) -> float:
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_with(_number_or_none(scaling, "beta_fast") or 32.0)
    last = pair_with(_number_or_none(scaling, "beta_slow") or 1.0)
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
    # Models without such a factor say 0.
    if not scaling.get("mscale") or not scaling.get("mscale_all_dim"):
        return magnified(1.0)
    return magnified(_number(scaling, "mscale")) / magnified(_number(scaling, "mscale_all_dim"))


def _dynamic(plain: list[float], theta: float, scaling: Scaling, length: float | None) -> Scaled:
    """Scale as NTK-aware scaling does: theta grows with the length, low frequencies most."""
    growth, less = growth_of_theta(scaling)
    size = 2 * len(plain)
    if size < 4:
        raise _wrong(f"scaling of rope_type 'dynamic' needs a size of 4 or more, not {size}")
    longest = max(length or 0.0, original_length(scaling))
    longer = max(growth * longest - less, 1.0)
    return [f * longer ** (-2 * pair / (size - 2)) for pair, f in enumerate(plain)], 1.0


def _longrope(plain: list[float], theta: float, scaling: Scaling, length: float | None) -> Scaled:
    """Scale as in "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens"."""
    known = original_length(scaling)
    factors = [_factors(scaling, key, len(plain)) for key in _LISTS]
    chosen = factors[length is not None and length > known]
    factor = _number_or_none(scaling, "attention_factor")
    if factor is None:
        grown = _number(scaling, "factor")
        if known <= 1:
            raise _wrong("'original_max_position_embeddings' of longrope must be more than 1")
        factor = math.sqrt(1 + math.log(grown) / math.log(known)) if grown > 1 else 1.0
    return [f / divisor for f, divisor in zip(plain, chosen, strict=True)], factor


_SCALED: dict[str, Callable[[list[float], float, Scaling, float | None], Scaled]] = {
    "default": lambda plain, theta, scaling, length: (plain, 1.0),
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _dynamic,
    "longrope": _longrope,
}
_BY_LENGTH = ("dynamic", "longrope")


def _factors(scaling: Scaling, key: str, count: int) -> list[float]:
    """Return a list of one number above 0 for each pair."""
    factors = scaling.get(key)
    if not isinstance(factors, tuple | list) or len(factors) != count:
        shown = f"{len(factors)} numbers" if isinstance(factors, tuple | list) else repr(factors)
        need = f"{key!r}, a list of a number for each of {count} pairs"
        raise _wrong(f"scaling of rope_type 'longrope' needs {need}, not {shown}")
    numbers = [_as_number(key, value) for value in factors]
    if not all(0 < number < math.inf for number in numbers):
        raise _wrong(f"{key!r} of the scaling must be numbers above 0, not {factors!r}")
    return numbers


def _number_or_none(scaling: Scaling, key: str) -> float | None:
    """Return a number above 0; `None` for a missing number, or 0."""
    return _number(scaling, key) if scaling.get(key) else None


def _number(scaling: Scaling, key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    if value is None:
        value = default
    if value is None:
        raise _wrong(f"scaling of rope_type {kind_of(scaling)!r} needs {key!r}, a number above 0")
    number = _as_number(key, value)
    if not 0 < number < math.inf:
        raise _wrong(f"{key!r} of the scaling must be a number above 0, not {value!r}")
    return number


def _as_text(key: str, value: Any) -> str | None:
    # PyTorch's compiler turns a changing number into a variable, but not its digits.
    if value is None or (key in _TEXTS and isinstance(value, str)):
        return value
    if key in _LISTS and isinstance(value, tuple | list):
        return " ".join([_as_number(key, number).hex() for number in value])
    return _as_number(key, value).hex()


def _from_text(key: str, text: str) -> Any:
    if key in _TEXTS:
        return text
    if key in _LISTS:
        return [float.fromhex(digits) for digits in text.split(" ")] if text else []
    return float.fromhex(text)


def _as_number(key: str, value: Any) -> float:
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise _wrong(f"{key!r} of the scaling must be a number, not {value!r}")


def _wrong(what: str) -> ConfigurationError:
    return ConfigurationError(f"rope: {what}", source="rope")
