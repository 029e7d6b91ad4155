"""A compiled model checked on its device: its weights, its parts, its output, its properties."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError, VerificationError
from anydevice.run.checking_models import (
    Inputs,
    Part,
    Property,
    Reference,
    check_output,
    check_parts,
    check_properties,
    check_weights,
    digest_of,
    found,
    part_of,
    reference_of,
    trace,
)
from anydevice.run.inputs import taken_apart
from anydevice.run.precision import Policy, cast
from anydevice.run.reports import Checked
from anydevice.run.subjects import Subject, in_words
from anydevice.run.tolerances import Tolerance, tolerance_of
from anydevice.transfer.moving import to_device, to_numpy

if TYPE_CHECKING:
    from anydevice.run.compiling import Compiled


class Evidence(Record):
    """A model before it was moved, and a hash of each weight as it should be on the device."""

    source: Subject
    digests: Mapping[str, str]

    @classmethod
    def of(cls, source: Subject, policy: Policy) -> Evidence:
        wanted = DTYPES[policy.parameters].numpy()
        digests = {}
        for path, x in source.weights().items():
            host = to_numpy(x)
            if host.dtype.kind in "fV":
                with np.errstate(all="ignore"):  # what becomes infinite is found by its effects
                    host = host.astype(wanted)
            digests[path] = digest_of(host)
        return cls(source, digests)


def refuse_no_functions(properties: Any) -> None:
    """Raise `ConfigurationError` where these are not several functions."""
    if not isinstance(properties, Collection) or not all(map(callable, properties)):
        raise ConfigurationError(
            "properties are functions of the output in a list, as in properties=[is_finite]",
            source="properties=",
        )


def verified(
    compiled: Compiled,
    evidence: Evidence,
    inputs: Inputs,
    properties: Sequence[Property],
) -> Checked:
    """What the checks found; raises `VerificationError` for the first thing that is wrong."""
    subject, policy, device = compiled._subject, compiled.policy, compiled.device
    given, named = inputs
    subject.accepts(given, named)
    form, arrays = taken_apart(given, named)
    if form.constants and not arrays:
        raise _no_example(given)
    subject.can_be_verified()
    check_weights(subject.weights(), evidence.digests)
    tolerance = tolerance_of(policy.compute, coarse_products=subject.has_coarse_products(device))
    reference = reference_of(
        evidence.source, compiled._engine.name, (to_numpy(given), to_numpy(named)), tolerance
    )
    dtype = subject.input_type(policy)
    placed = [cast(to_device(x, device, convert=True, narrow=True), dtype) for x in arrays]
    parts = trace(subject.for_tracing(device, policy), form.filled(placed))
    largest = check_parts(parts, reference, tolerance)
    output = compiled(*given, **named)
    try:
        largest = max(largest, check_output(output, reference, tolerance))
    except VerificationError as error:
        raise _in_compiled_code(compiled, placed, parts, reference, tolerance, error) from error
    held = check_properties(output, properties)
    return found(reference, len(evidence.digests), largest, held)


def _no_example(given: Sequence[Any]) -> ConfigurationError:
    return ConfigurationError(
        f"verify takes an example of what the model takes, and {in_words(given[0])} holds no "
        "array; give an array, a tuple of several inputs, or a dict of inputs by name",
        source="verify=",
    )


def _in_compiled_code(
    compiled: Compiled,
    inputs: Sequence[Any],
    written: Sequence[Part],
    reference: Reference,
    tolerance: Tolerance,
    error: VerificationError,
) -> VerificationError:
    """The error with the first part that is wrong in compiled code, where it can be found."""
    where, said = error.where, str(error)
    try:
        values = _compiled_parts(compiled, inputs)
        if values is not None:
            names = [part.name for part in written]
            got = [part_of(name, value) for name, value in zip(names, values, strict=True)]
            check_parts(got, reference, tolerance)
    except VerificationError as found_inside:
        where, said = found_inside.where, str(found_inside)
    return VerificationError(
        f"in the compiled code, {said}. Run as written, every part is right: compile with "
        'optimize="none", and tell the library\'s makers',
        where=where,
        shapes=error.shapes,
        largest_error=error.largest_error,
    )


def _compiled_parts(compiled: Compiled, inputs: Sequence[Any]) -> list[Any] | None:
    subject = compiled._subject.for_tracing(compiled.device, compiled.policy)
    ways = compiled._versions.ways
    if not ways:
        return None
    values: list[Any] | None = ways[0][1](subject.with_parts)(subject.arguments, *inputs)
    return values
