"""The dtypes, as data: one row each, with their names in other libraries."""

from __future__ import annotations

from typing import Any, Literal

from anydevice._core.record import Record
from anydevice.errors import ConfigurationError, UnsupportedError

DTypeKind = Literal["bool", "int", "uint", "float", "complex"]
"""The kinds of dtypes; the array API's "real floating" is `float` here."""


class DType(Record):
    """One dtype.

    `module` is the library that defines its NumPy scalar type, `numpy` or `ml_dtypes`; `code` is
    its name in a safetensors file, `None` if the format has none.

    >>> DTYPES["bfloat16"].itemsize, DTYPES["bfloat16"].code, DTYPES["bfloat16"].kind
    (2, 'BF16', 'float')
    """

    name: str
    bits: int
    kind: DTypeKind
    code: str | None = None
    module: str = "numpy"

    @property
    def packed(self) -> bool:
        """Whether files pack several elements into one byte; arrays use one byte for each."""
        return self.bits < 8

    @property
    def itemsize(self) -> int:
        """The bytes of one element in a host array."""
        return (self.bits + 7) // 8

    def numpy(self) -> Any:
        """Return the `numpy.dtype` of this dtype.

        Raises `UnsupportedError` if the installed ml_dtypes is too old to have it.

        >>> DTYPES["bfloat16"].numpy().itemsize
        2
        """
        import numpy

        if self.module == "numpy":
            return numpy.dtype(self.name)
        import ml_dtypes

        try:
            return numpy.dtype(getattr(ml_dtypes, self.name))
        except AttributeError as error:
            raise UnsupportedError(
                f"the installed {self.module} is too old to have {self.name}; "
                f"run: pip install --upgrade {self.module}"
            ) from error

    def __str__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("bool", 8, "bool", "BOOL"),
        DType("int8", 8, "int", "I8"),
        DType("int16", 16, "int", "I16"),
        DType("int32", 32, "int", "I32"),
        DType("int64", 64, "int", "I64"),
        DType("uint8", 8, "uint", "U8"),
        DType("uint16", 16, "uint", "U16"),
        DType("uint32", 32, "uint", "U32"),
        DType("uint64", 64, "uint", "U64"),
        DType("float16", 16, "float", "F16"),
        DType("float32", 32, "float", "F32"),
        DType("float64", 64, "float", "F64"),
        DType("complex64", 64, "complex", "C64"),
        DType("complex128", 128, "complex"),
        DType("bfloat16", 16, "float", "BF16", "ml_dtypes"),
        DType("float8_e4m3fn", 8, "float", "F8_E4M3", "ml_dtypes"),
        DType("float8_e5m2", 8, "float", "F8_E5M2", "ml_dtypes"),
        DType("float8_e4m3fnuz", 8, "float", "F8_E4M3FNUZ", "ml_dtypes"),
        DType("float8_e5m2fnuz", 8, "float", "F8_E5M2FNUZ", "ml_dtypes"),
        DType("float8_e8m0fnu", 8, "float", "F8_E8M0", "ml_dtypes"),
        DType("float8_e4m3b11fnuz", 8, "float", None, "ml_dtypes"),
        DType("float8_e4m3", 8, "float", None, "ml_dtypes"),
        DType("float8_e3m4", 8, "float", None, "ml_dtypes"),
        DType("float6_e2m3fn", 6, "float", "F6_E2M3", "ml_dtypes"),
        DType("float6_e3m2fn", 6, "float", "F6_E3M2", "ml_dtypes"),
        DType("float4_e2m1fn", 4, "float", "F4", "ml_dtypes"),
        DType("int4", 4, "int", None, "ml_dtypes"),
        DType("uint4", 4, "uint", None, "ml_dtypes"),
        DType("int2", 2, "int", None, "ml_dtypes"),
        DType("uint2", 2, "uint", None, "ml_dtypes"),
    )
}

BY_CODE: dict[str, DType] = {row.code: row for row in DTYPES.values() if row.code}
"""The dtypes that a safetensors file can hold, by the format's name for them."""

_SAID_ELSEWHERE = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "single": "float32",
    "fp32": "float32",
    "float": "float32",
    "double": "float64",
    "fp64": "float64",
} | {code.lower(): row.name for code, row in BY_CODE.items() if code != "BOOL"}
"""Other names of the dtypes, only for "did you mean"."""


def as_dtype(spec: object) -> DType:
    """Return the `DType` of a name or a library's dtype; raise `ConfigurationError` with hints."""
    if isinstance(spec, DType):
        return spec
    name = spec if isinstance(spec, str) else _name_of(spec)
    row = DTYPES.get(name)
    if row is None:
        meant = _SAID_ELSEWHERE.get(name.lower())
        hint = f"did you mean {meant!r}?" if meant else f"the dtypes are {', '.join(DTYPES)}"
        raise ConfigurationError(f"there is no dtype {name!r}; {hint}")
    return row


def _name_of(spec: object) -> str:
    """Return the name of a library's own dtype: `torch.bfloat16`, `numpy.dtype("<f4")`, …"""
    for name in (getattr(spec, "name", None), getattr(spec, "__name__", None)):
        if isinstance(name, str):
            return name.removesuffix("_")  # NumPy 1 calls its own bool `bool_`
    return str(spec).rpartition(".")[2]
