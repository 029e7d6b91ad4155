"""A compiled model checked on its device: its weights, its parts, its output, its properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record
from anydevice.run.checking_models import (
    Property,
    check_output,
    check_parts,
    check_properties,
    check_weights,
    digest_of,
    found,
    reference_of,
    tolerance_of,
    trace,
)
from anydevice.run.inputs import taken_apart
from anydevice.run.precision import Policy, cast
from anydevice.run.reports import Checked
from anydevice.run.subjects import Subject
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
            floating = host.dtype.kind in "fV"
            digests[path] = digest_of(host.astype(wanted) if floating else host)
        return cls(source, digests)


def verified(
    compiled: Compiled,
    evidence: Evidence,
    inputs: tuple[Any, ...],
    properties: Sequence[Property],
) -> Checked:
    """What the checks found; raises `VerificationError` for the first thing that is wrong."""
    subject, policy, device = compiled._subject, compiled.policy, compiled.device
    subject.accepts(inputs, {})
    subject.can_be_verified()
    check_weights(subject.weights(), evidence.digests)
    tolerance = tolerance_of(policy.compute, coarse_products=subject.has_coarse_products(device))
    reference = reference_of(
        evidence.source, compiled._engine.name, (to_numpy(inputs), {}), tolerance
    )
    form, arrays = taken_apart(inputs, {})
    dtype = subject.input_type(policy)
    placed = [cast(to_device(x, device, convert=True, narrow=True), dtype) for x in arrays]
    parts = trace(subject.for_tracing(device, policy), form.filled(placed))
    largest = check_parts(parts, reference, tolerance)
    output = compiled(*inputs)
    largest = max(largest, check_output(output, reference, tolerance))
    held = check_properties(output, properties)
    return found(reference, len(evidence.digests), largest, held)
