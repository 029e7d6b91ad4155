"""The GPUs that a program sees, by the variables that ROCm's two runtimes read.

They read them one after the other, and each by its own rules:

- ROCR_VISIBLE_DEVICES counts over all GPUs. Blanks and case do not matter, an index may be written
  in hexadecimal, a UUID may be cut short if it stays unambiguous. An entry that names no GPU, or
  one named before, ends the list.
- HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is not set, counts over what the first
  left. An index is plain digits without a blank; a UUID may be any part of one that starts with
  "GPU-". An entry that names no GPU ends the list; one named before is passed over.

An empty value hides every GPU. GPU_DEVICE_ORDINAL is for OpenCL alone: HIP does not read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from anydevice._core.finding import Reason
from anydevice._core.record import Record

Pick = Callable[[str, Sequence[str | None]], tuple[list[int], str | None]]
"""How a runtime reads its list: the chosen indices, and the entry that ended it early."""

_NUMBER = re.compile(r"([+-]?)(?:0X([0-9A-F]+)|(0[0-7]*)|([1-9][0-9]*))")
_SHORTEST, _LONGEST = len("GPU-") + 1, len("GPU-") + 16


class Visible(Record):
    """Positions of the visible GPUs in order; `reason` is the variable that hid them all."""

    positions: tuple[int, ...]
    reason: Reason | None = None
    notes: tuple[str, ...] = ()


def visible(uuids: Sequence[str | None], environment: Mapping[str, str]) -> Visible:
    """Return the visible ones of the GPUs with these UUIDs (`None` for a GPU that has none)."""
    left = tuple(range(len(uuids)))
    notes: list[str] = []
    narrowed = ""
    for variable, pick in _variables(environment):
        value = environment[variable]
        chosen, stopped_at = pick(value, [uuids[position] for position in left])
        if not chosen:
            gpus = "the one GPU" if len(left) == 1 else f"any of the {len(left)} GPUs"
            text = f"{variable}={value} does not show {gpus}{narrowed}"
            if not value.strip():
                text = f"{variable} is set to an empty value, which hides every GPU"
            return Visible((), Reason("hidden", text, f"unset {variable}"))
        if stopped_at is not None:
            notes.append(
                f'{variable}={value}: "{stopped_at}" names no further GPU, so the list ends there'
            )
        left = tuple(left[index] for index in chosen)
        narrowed = f" that {variable}={value} leaves"
    return Visible(left, notes=tuple(notes))


def _variables(environment: Mapping[str, str]) -> list[tuple[str, Pick]]:
    present: list[tuple[str, Pick]] = []
    if "ROCR_VISIBLE_DEVICES" in environment:
        present.append(("ROCR_VISIBLE_DEVICES", _pick_rocr))
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if variable in environment:
            present.append((variable, _pick_hip))
            break
    return present


def _pick_rocr(value: str, uuids: Sequence[str | None]) -> tuple[list[int], str | None]:
    chosen: list[int] = []
    for entry in value.split(","):
        token = entry.strip().upper()
        index = _by_prefix(token, uuids) if token.startswith("G") else _as_c_number(token)
        if index is None or not 0 <= index < len(uuids) or index in chosen:
            return chosen, entry
        chosen.append(index)
    return chosen, None


def _by_prefix(token: str, uuids: Sequence[str | None]) -> int | None:
    if not _SHORTEST <= len(token) <= _LONGEST:
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid and uuid.upper().startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _as_c_number(token: str) -> int | None:
    match = _NUMBER.fullmatch(token)
    if match is None:
        return None
    sign, hexadecimal, octal, decimal = match.groups()
    bases = ((hexadecimal, 16), (octal, 8), (decimal, 10))
    number = next(int(digits, base) for digits, base in bases if digits)
    return -number if sign == "-" else number


def _pick_hip(value: str, uuids: Sequence[str | None]) -> tuple[list[int], str | None]:
    chosen: list[int] = []
    for entry in value.split(","):
        if "GPU-" in entry:
            index = next((at for at, uuid in enumerate(uuids) if uuid and entry in uuid), None)
        else:
            index = next((at for at in range(len(uuids)) if str(at) == entry), None)
        if index is None:
            return chosen, entry
        if index not in chosen:
            chosen.append(index)
    return chosen, None
