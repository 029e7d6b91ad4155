"""Flags of XLA are tried in a child: an unknown one would end the process without an exception."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import output_of

pytest.importorskip("jaxlib")

UNKNOWN = "--xla_gpu_enable_triton_softmax_fusion=true"
PROGRAM = f"""
import os, subprocess, anydevice
from anydevice._machine.engines import xla_flags

flags = "--xla_cpu_enable_fast_math=false {UNKNOWN} --xla_gpu_enable_command_buffer=?"
flags += " --xla_force_host_platform_device_cont=2 --xla_gpu_autotune_level=a --xla_dump_to"
flags += " --xla_force_host_platform_device_count=2"
for _ in range(2):
    try:
        anydevice.configure(env={{"XLA_FLAGS": flags, "SOME_SWITCH": "1"}}, time_limit=7)
    except anydevice.ConfigurationError as error:
        print(error)
    subprocess.run = None  # the verdicts are known now
print(os.environ["XLA_FLAGS"], os.environ["SOME_SWITCH"], anydevice.configure().time_limit)
import jax
print(len(jax.devices("cpu")))
"""


def test_an_unknown_flag_is_an_error_that_names_the_nearest_and_the_rest_takes_effect(
    tmp_path: Path,
) -> None:
    env = {"XLA_FLAGS": None, "ANYDEVICE_HOME": str(tmp_path)}
    first, second, rest, count = output_of("-c", PROGRAM, env=env).splitlines()
    assert first == second
    assert "has no flag --xla_gpu_enable_triton_softmax_fusion; the nearest is --xla_gpu_" in first
    assert "device_cont; the nearest is --xla_force_host_platform_device_count" in first
    for flag in ("--xla_gpu_enable_command_buffer=?", "--xla_gpu_autotune_level=a"):
        assert f"does not take the value of {flag}" in first
    assert "needs a value for --xla_dump_to" in first
    kept = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2"
    assert rest == f"{kept} 1 7.0"
    assert count == "2"


def test_a_value_that_xla_does_not_name_is_found_by_trying_each_flag(tmp_path: Path) -> None:
    program = """
from anydevice._machine.engines.xla_flags import refused_flags
print(refused_flags("--xla_cpu_enable_fast_math --xla_force_host_platform_device_count=0"))
print(refused_flags("--xla_cpu_enable_fast_math"))
print(refused_flags("-xla_cpu_enable_fast_math"))
print(refused_flags("no_such_file"))
"""
    env = {"XLA_FLAGS": None, "ANYDEVICE_HOME": str(tmp_path)}
    refused, none, dash, file = output_of("-c", program, env=env).splitlines()
    flag = "--xla_force_host_platform_device_count=0"
    assert re.fullmatch(rf"{{'{flag}': 'jaxlib .* does not take the value of {flag}'}}", refused)
    assert none == "{}"
    assert "has no flag -xla_cpu_enable_fast_math; the nearest is --xla_cpu_enable" in dash
    assert "cannot take flags from a file no_such_file" in file


def test_a_child_that_does_not_answer_in_time_is_no_verdict(tmp_path: Path) -> None:
    program = """
from anydevice._machine.engines import xla_flags
xla_flags._LIMIT = 0
print(xla_flags.refused_flags("--xla_no_such_flag"), xla_flags.flags_file().exists())
"""
    assert output_of("-c", program, env={"ANYDEVICE_HOME": str(tmp_path)}) == "{} False\n"
