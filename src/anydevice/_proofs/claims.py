"""Claims: a property over a region, with the certificates of its proof; saved with models."""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any

from anydevice._core import checks, hooks
from anydevice._core.record import Record
from anydevice._core.text import format_size, type_text
from anydevice._proofs import properties
from anydevice._proofs.checking import checker
from anydevice._proofs.checking.certificate import UNPACK, read_certificate
from anydevice._proofs.checking.network import FormatError, RefusedError
from anydevice._proofs.checking.smooth import executors_of
from anydevice._proofs.lowering import lower
from anydevice._proofs.properties import Property, Region, name_of
from anydevice._proofs.prove import Counterexample, Proof, Undecided, group_by_network, prove
from anydevice.errors import ConfigurationError, VerificationError

LIMIT = 60.0
"""Seconds for the proof of a claim that has no certificate."""


class Claim(Record):
    """A property that holds for every input of a region; see `claim`."""

    property: Property
    region: Region
    precision: str = "float32"
    certificates: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        kind = type(self.region).__name__.lower()
        shape = self.region.shape
        return f"{self.property} over a {kind}" + ("" if shape is None else f" of {shape}")

    def check(self, model: Any, unpack: int = UNPACK) -> int:
        """Check the certificates for a model, and return the number of parts of the proof.

        Checks with NumPy alone, for the weights that the model has now. Each certificate may
        unpack to `unpack` MiB. Raises `VerificationError` if they prove something else, as after
        a training, and `ConfigurationError` if there is none.
        """
        if not self.certificates:
            raise ConfigurationError(
                f"{self} has no certificate; prove it, and give the proof to proofs.claim",
                source="properties",
            )
        lowered = lower(
            model, self.region.shape, classes=self.property.about_order, over=self.region
        )
        problems = properties.problems(self.property, lowered.network, self.region)
        theorems = group_by_network(problems, self.precision)
        if len(theorems) != len(self.certificates):
            raise VerificationError(f"{self}: its certificates are about something else")
        leaves = 0
        for theorem, data in zip(theorems, self.certificates, strict=True):
            try:
                certificate = read_certificate(data, unpack)
                if certificate.arithmetic != theorem.arithmetic:
                    raise RefusedError(f"it is about {certificate.arithmetic} arithmetic")
                leaves += checker.check(theorem.network, theorem.queries, certificate)
            except (FormatError, RefusedError) as error:
                raise VerificationError(
                    f"the certificate of {self} does not hold for this model: {error}; prove it "
                    "again if the weights have changed",
                    where=str(self),
                ) from error
        return leaves

    def checked(self, model: Any) -> str:
        """Check the claim, and describe the proof; a claim without certificates is proved first."""
        claim = self if self.certificates else self.proved(model)
        leaves = claim.check(model)
        named = executors_of(read_certificate(claim.certificates[0]).assumptions)
        by = f" by {', '.join(named)}" if named else ""
        size = format_size(sum(map(len, claim.certificates)))
        covered = (
            f"for every float32 execution{by}"
            if self.precision == "float32"
            else "in exact arithmetic, roundings of float32 are not covered"
        )
        return f"{covered}; {leaves} parts checked again, certificate of {size}"

    def proved(self, model: Any, limit: float | None = LIMIT) -> Claim:
        """Prove the claim for a model, and return it with certificates.

        Raises `VerificationError` if it does not hold, or was not decided within the limit.
        """
        result = prove(model, self.property, self.region, precision=self.precision, limit=limit)
        if isinstance(result, Counterexample):
            raise VerificationError(
                f"{self} does not hold: not for x = {result.x.tolist()!r:.200}", where=str(self)
            )
        if isinstance(result, Undecided):
            raise VerificationError(
                f"{self} was neither proved nor refuted ({result.reason}, "
                f"{result.proved_share:.0%} proved); call proofs.prove with a larger limit, and "
                "give its proof to proofs.claim",
                where=str(self),
            )
        return claim(self.property, self.region, proof=result)


def claim(
    property: Property,  # noqa: A002 - the word for it
    over: Region,
    *,
    precision: str = "float32",
    proof: Proof | None = None,
) -> Claim:
    """Return a claim, to be attached to a model, saved with it, and checked again.

    `proof` is the result of `proofs.prove`: the claim has its certificates and its precision.

    >>> from anydevice import nn, proofs
    >>> model = nn.build(nn.Dense(2, 1), "sigmoid", device="cpu")
    >>> share, unit = proofs.within(0, 1), proofs.box(-1.0, 1.0)
    >>> claim = proofs.claim(share, unit, proof=proofs.prove(model, share, unit))
    >>> claim.check(model)
    1
    """
    properties.check_property(property)
    properties.check_region(over)
    if proof is None:
        return Claim(property, over, checks.one_of("precision", precision, ("float32", "real")))
    if not isinstance(proof, Proof):
        raise ConfigurationError(
            f"proof= is a proofs.Proof, and this is {type_text(proof)}: nothing was proved",
            source="proof=",
        )
    data = [certificate._replace(carried=None).to_bytes() for certificate in proof.certificates]
    return Claim(property, over, proof.precision, tuple(data))


def split_claims(items: Collection[Any]) -> tuple[list[Claim], list[Any]]:
    """Separate the claims, which hold for every input, from functions.

    Raises `ConfigurationError` for a property without a region.
    """
    for item in items:
        if isinstance(item, Property):
            raise ConfigurationError(
                f"{item} says nothing about inputs; give it a region, as in "
                "proofs.claim(property, over=proofs.box(low, high))",
                source="properties=",
            )
    claims = [item for item in items if isinstance(item, Claim)]
    return claims, [item for item in items if not isinstance(item, Claim)]


def to_json(claim: Any) -> dict[str, Any]:
    """Return a claim as JSON; raises `ConfigurationError` for a Python function."""
    if not isinstance(claim, Claim):
        what = f"{name_of(claim)}, a Python function," if callable(claim) else type_text(claim)
        raise ConfigurationError(
            f"{what} cannot be saved with a model: only claims of anydevice.proofs are data; leave "
            "it out with model.with_properties(…)",
            source="properties",
        )
    return {
        "property": properties.to_json(claim.property),
        "region": properties.to_json(claim.region),
        "precision": claim.precision,
        "certificates": [base64.b64encode(data).decode() for data in claim.certificates],
    }


def from_json(described: Any) -> Claim:
    """Return the claim that `to_json` described; raises `ConfigurationError`."""
    try:
        precision = described["precision"]
        data = [base64.b64decode(text, validate=True) for text in described["certificates"]]
        made = claim(
            properties.from_json(described["property"]),
            properties.from_json(described["region"]),
            precision=precision,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"this is no claim: {error!r}", source="properties") from error
    return Claim(made.property, made.region, precision, tuple(data))


hooks.split_claims.register(split_claims)
hooks.claim_to_json.register(to_json)
hooks.claim_from_json.register(from_json)
