"""Let PoCL compile for processors that its LLVM does not know, in the environment of the tests.

    python tests/fix_pocl.py

PoCL 3.0 is the newest on the package index. Where its LLVM 14 does not know the processor (AMD's of
2024 are the first), it names "generic" to its clang, which refuses that name; see issue 1049 of
pocl/pocl. This names "haswell" instead, whose instructions every newer processor has.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

BUILD = """
import pyopencl
for platform in pyopencl.get_platforms():
    pyopencl.Program(pyopencl.Context(platform.get_devices()), "kernel void f() {}").build()
"""

OLD, NEW = b"\0 generic\0", b"\0 haswell\0"
"""The name with its neighbours, which is once in the library."""


def is_unknown() -> bool:
    """Whether PoCL fails to build a kernel because it does not know the processor."""
    command = [sys.executable, "-W", "ignore", "-c", BUILD]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return "unknown target CPU 'generic'" in result.stderr


def main() -> None:
    package = find_spec("pyopencl")
    if package is None or package.origin is None or not is_unknown():
        return
    for library in (Path(package.origin).parent / ".libs").glob("libpocl-*.so"):
        code = library.read_bytes()
        if code.count(OLD) == 1:
            library.write_bytes(code.replace(OLD, NEW))
    if is_unknown():
        sys.exit("PoCL cannot compile for this processor: the tests of OpenCL will fail")
    print("PoCL does not know this processor: it compiles for an older one")


if __name__ == "__main__":
    main()
