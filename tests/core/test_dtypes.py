"""The table of dtypes, against NumPy, ml_dtypes, the array libraries and safetensors."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

from anydevice._core import dtypes
from anydevice._core.dtypes import BY_CODE, DTYPES, DType, as_dtype
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.programs import output_of

KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@pytest.mark.parametrize("name", DTYPES)
def test_a_row_says_what_numpy_says(name: str) -> None:
    row = DTYPES[name]
    real = row.numpy()
    assert real.name == name
    assert real.itemsize == row.itemsize
    assert as_dtype(real) is row
    if row.module == "numpy":
        assert KINDS[real.kind] == row.kind
        assert row.bits == 8 * row.itemsize
    else:
        limits: Any = ml_dtypes.finfo if row.kind == "float" else ml_dtypes.iinfo
        assert limits(real).bits == row.bits


def test_packed_is_what_is_smaller_than_a_byte() -> None:
    packed = {row.name: row.itemsize for row in DTYPES.values() if row.packed}
    floats = ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
    assert packed == dict.fromkeys((*floats, "int4", "uint4", "int2", "uint2"), 1)


def test_the_codes_are_those_that_safetensors_knows() -> None:
    header = b'{"a":{"dtype":"NONE","shape":[],"data_offsets":[0,0]}}'
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(len(header).to_bytes(8, "little") + header)
    known = re.findall(r"`(\w+)`", str(caught.value).partition("expected one of")[2])
    assert set(known) == set(BY_CODE)


@pytest.mark.parametrize("code", [code for code, row in BY_CODE.items() if not row.packed])
def test_the_size_of_each_code_is_that_of_safetensors(code: str) -> None:
    size = BY_CODE[code].itemsize
    header = f'{{"a":{{"dtype":"{code}","shape":[1],"data_offsets":[0,{size}]}}}}'.encode()
    content = len(header).to_bytes(8, "little") + header + bytes(size)
    assert safetensors.deserialize(content)[0][1]["dtype"] == code


def test_the_objects_of_every_library_are_understood() -> None:
    import jax.numpy as jnp
    import mlx.core as mx
    import torch

    for spec in ("bfloat16", ml_dtypes.bfloat16, np.dtype("bfloat16"), torch.bfloat16):
        assert as_dtype(spec) is DTYPES["bfloat16"]
    for spec in (jnp.bfloat16, jnp.dtype("bfloat16"), mx.bfloat16, DTYPES["bfloat16"]):
        assert as_dtype(spec) is DTYPES["bfloat16"]
    assert as_dtype(torch.float8_e4m3fn).code == "F8_E4M3"
    assert as_dtype(np.dtype(">f4")).name == "float32"
    older = type("bool_", (), {})  # as NumPy 1 calls it
    assert as_dtype(np.bool_).name == as_dtype(older).name == "bool"


@pytest.mark.parametrize(
    ("spec", "meant"),
    [("bf16", "bfloat16"), ("F32", "float32"), ("fp32", "float32"), (float, "float32")],
)
def test_another_spelling_is_refused_with_the_right_one(spec: object, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"; did you mean '{meant}'\?$"):
        as_dtype(spec)


@pytest.mark.parametrize("spec", ["", "text", 7, None, np.dtype("U4"), np.longdouble])
def test_what_is_no_type_is_refused_with_the_valid_names(spec: object) -> None:
    with pytest.raises(ConfigurationError, match=r"the dtypes are bool, int8, .*bfloat16"):
        as_dtype(spec)


def test_a_type_that_ml_dtypes_lacks_says_what_to_install() -> None:
    row = DType("float5_never", 8, "float", None, "ml_dtypes")
    with pytest.raises(UnsupportedError, match="pip install --upgrade ml_dtypes"):
        row.numpy()


def test_a_row_prints_as_its_name() -> None:
    assert f"{DTYPES['float16']}" == "float16"


def test_the_table_imports_no_array_library() -> None:
    program = f"import sys, {dtypes.__name__}; print({{'numpy', 'ml_dtypes'}} & set(sys.modules))"
    assert output_of("-c", program) == "set()\n"
