"""Theorems and certificates in files: ONNX, VNN-LIB and our own, with errors that name the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from anydevice._core.files import open_ordinary
from anydevice._core.record import Record
from anydevice._proofs.checking.certificate import UNPACK, Certificate
from anydevice._proofs.checking.certificate import read_certificate as certificate_in
from anydevice._proofs.checking.network import (
    FormatError,
    Network,
    NotSupportedError,
    Query,
    RefusedError,
)
from anydevice.errors import ConfigurationError, UnsupportedError, VerificationError

T = TypeVar("T")


class ModelFile(Record):
    """The network of a file, its hash and its bytes; `softmax`: whether a last one was dropped."""

    path: str
    hash: str
    network: Network
    softmax: bool = False
    data: bytes = b""


def read_model(path: str | Path) -> ModelFile:
    """Read the network in an ONNX file."""
    from anydevice._proofs.checking.operators import read_onnx

    data = _read_bytes(path)
    network, softmax = _parse(path, lambda: read_onnx(data))
    return ModelFile(str(path), hashlib.sha256(data).hexdigest(), network, softmax, data)


def read_queries(path: str | Path, model: ModelFile | None = None) -> tuple[Query, ...]:
    """Read the queries in a VNN-LIB file, which must fit the inputs and outputs of a model."""
    from anydevice._proofs.checking.readers import read_vnnlib

    data = _read_bytes(path)
    inputs, outputs, queries = _parse(path, lambda: read_vnnlib(data.decode()))
    if model is not None:
        here = (model.network.inputs, model.network.outputs)
        if (inputs, outputs) != here:
            raise ConfigurationError(
                f"{path} is about {inputs} inputs and {outputs} outputs, and {model.path} has "
                f"{here[0]} and {here[1]}",
                source=str(path),
            )
        check_softmax(model, queries, str(path))
    return queries


def read_array(path: str | Path) -> Any:
    """Read the array in a `.npy` file."""
    data = _read_bytes(path)
    try:
        return np.asarray(np.load(BytesIO(data)), np.float64)
    except (EOFError, MemoryError, OSError, TypeError, ValueError) as error:
        text = f"{path} is no file of numbers that numpy.save(path, x) wrote: {error}"
        raise ConfigurationError(text, source=str(path)) from error


def check_softmax(model: ModelFile, queries: Sequence[Query], claim: str) -> None:
    """Raise `UnsupportedError` if queries of logits say something else about their softmax."""
    if model.softmax and not all(map(_compares, queries)):
        raise UnsupportedError(
            f"{claim} asks for more than an order of the outputs of {model.path}, which ends in "
            "a softmax: remove the softmax, or compare two outputs in each row"
        )


def read_certificate(path: str | Path, unpack: int | None = None) -> Certificate:
    """Read the certificate in a file; it may unpack to `unpack` MiB, 64 by default."""
    data = _read_bytes(path)
    return _parse(path, lambda: certificate_in(data, unpack or UNPACK))


def check(
    model: ModelFile, queries: Sequence[Query], certificate: Certificate, path: str | Path
) -> int:
    """Check a certificate, and return the number of its parts; an error names the open one."""
    from anydevice._proofs.checking.checker import check as check_all

    try:
        if certificate.model and certificate.model != model.hash:
            raise RefusedError(f"it is about another file than {model.path}")
        return check_all(model.network, queries, certificate)
    except (RefusedError, FormatError) as error:
        where = getattr(error, "leaf", "")
        raise VerificationError(f"{path} is refused: {error}", where=where) from error


def _compares(query: Query) -> bool:
    """Whether each row says which of two outputs is larger."""
    rows = [[number for number in row if number] for row in query.coefficients]
    return not any(query.constants) and all(len(row) == 2 and not sum(row) for row in rows)


def _read_bytes(path: str | Path) -> bytes:
    try:
        with open(open_ordinary(path), "rb") as file:
            data = file.read()
    except OSError as error:
        why = error.strerror or error
        raise ConfigurationError(f"{path} cannot be read: {why}", source=str(path)) from error
    if not data:
        raise ConfigurationError(f"{path} is empty", source=str(path))
    return data


def _parse(path: str | Path, read: Callable[[], T]) -> T:
    """Call `read`, and name the file in its errors."""
    try:
        return read()
    except NotSupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error
    except (FormatError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}", source=str(path)) from error
