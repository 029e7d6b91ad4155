"""`anydevice quantize`: write a language model as a GGUF file with quantized weights."""

from __future__ import annotations

import argparse

from anydevice._core.text import format_count, format_size
from anydevice.cli.options import add_options, add_switches
from anydevice.cli.printing import Output

EXAMPLE = "anydevice quantize path/to/model model.gguf --type q4_k_m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="FOLDER", help="a model's folder, its name, or a GGUF file"
    )
    parser.add_argument("path", metavar="FILE", help="the GGUF file to write")
    schemes = "q8_0, q6_k, q5_k_m, q4_k_m (the default), q5_0, q5_1, q4_0, q4_1 or f16"
    add_options(parser, ("--type", "TYPE", str, schemes))
    parser.set_defaults(type="q4_k_m")
    add_switches(parser, force="replace an existing file")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the file, and say what it takes."""
    from anydevice import llm

    file = llm.quantize(
        arguments.model,
        arguments.path,
        arguments.type,
        force=arguments.force,
        progress=False if arguments.json else None,
    )
    if arguments.json:
        output.json(
            {
                "file": str(file.path),
                "type": file.scheme,
                "bytes": file.nbytes,
                "parameters": file.parameters,
                "bits": file.bits,
                "tensors": dict(file.kinds),
            }
        )
        return 0
    kinds = ", ".join(f"{count} in {kind.lower()}" for kind, count in file.kinds.items())
    output.say(
        f"Written: {file.path}, {format_size(file.nbytes)} in {file.scheme}",
        f"  {format_count(file.parameters)} parameters, {file.bits:.2f} bits each; tensors: "
        f"{kinds}",
    )
    return 0
