"""`anydevice bench`: the peak rates of this machine, and how close every op comes to them."""

from __future__ import annotations

import argparse
import json

from anydevice._bench.language_models import WRITTEN, bench_text
from anydevice._bench.measure import LIMIT, QUICK_LIMIT, bench, save
from anydevice._bench.results import Results, compare_runs, read_results
from anydevice._machine.choose.measurements import measured_engines
from anydevice._machine.discovery.discover import discover
from anydevice._machine.settings.files import measurements_file
from anydevice._plan.config import locate
from anydevice._report.benchmark import (
    comparison_lines,
    measurement_lines,
    summary_lines,
    text_lines,
)
from anydevice.cli.loading import load_model
from anydevice.cli.main import ANSWER_IS_NO, NOT_DONE
from anydevice.cli.options import add_filters, add_removed_page, count, progress_on, seconds
from anydevice.cli.printing import Output, check_file, complain, write_file
from anydevice.errors import ConfigurationError

EXAMPLE = "anydevice bench --quick --op matmul,softmax --json"

_CONTEXTS = [128, 512]
"""Default lengths of prompts, in tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the selection, the time limits and the outputs."""
    add_filters(parser)
    parser.add_argument(
        "--quick", action="store_true", help="one case of each op, and less time for each"
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        metavar="SECONDS",
        help=f"for one op on one engine ({LIMIT:g}; {QUICK_LIMIT:g} if quick)",
    )
    parser.add_argument(
        "--llm",
        metavar="MODEL",
        help="measure a language model instead: a folder, a GGUF file, or a name in the Hugging "
        "Face cache; with one --device, --engine and --dtype",
    )
    parser.add_argument(
        "--context",
        type=_counts,
        metavar="TOKENS",
        help="with --llm: lengths of prompts, such as 512,4k (128, 512)",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="with --json: write it there")
    add_removed_page(parser)
    parser.add_argument(
        "--compare", metavar="FILE", help="say what got slower since that --json; exit code 1 if so"
    )
    parser.add_argument(
        "--from",
        dest="from_",
        metavar="FILE",
        help="measure nothing: show that --json, as with --compare",
    )
    parser.add_argument(
        "--save", action="store_true", help="let device() choose engines by these measurements"
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Measure and print; return 1 if something got slower or nothing could be compared."""
    if arguments.file and not arguments.json:
        raise ConfigurationError(
            f"what is {arguments.file!r}? write --json {arguments.file} to save the results there",
            "FILE",
        )
    if arguments.llm is not None:
        return _run_model(arguments, output)
    if arguments.context:
        raise ConfigurationError("--context is for --llm: name a model", "--context")
    file = None if arguments.file in (None, "-") else arguments.file
    silent = arguments.json and file is None
    old = read_results(arguments.compare) if arguments.compare else None
    check_file(file)
    results = _read_saved(arguments) if arguments.from_ else _measure(arguments, output, silent)
    comparison = compare_runs(old, results) if old is not None else None
    data = results.to_dict() | (
        {"comparison": comparison.to_dict()} if comparison is not None else {}
    )
    if silent:
        output.json(data)
    else:
        output.say(*summary_lines(results), *measurement_lines(results, output.width))
        if comparison is not None:
            output.say(*comparison_lines(comparison, arguments.compare))
    if file:
        write_file(file, json.dumps(results.to_dict(), indent=1) + "\n")
    if arguments.save and not _save(results, None if silent else output):
        return NOT_DONE
    slower = comparison is not None and not comparison
    return 0 if results.measured and not slower else ANSWER_IS_NO


def _measure(arguments: argparse.Namespace, output: Output, silent: bool) -> Results:
    with progress_on(output, silent=silent) as bar:
        return bench(
            arguments.op,
            arguments.device,
            arguments.engine,
            arguments.dtype,
            quick=arguments.quick,
            limit=arguments.limit,
            isolated=True,
            progress=bar.tell,
        )


def _read_saved(arguments: argparse.Namespace) -> Results:
    for name in ("op", "device", "engine", "dtype", "quick", "limit", "save"):
        if getattr(arguments, name):
            raise ConfigurationError(
                f"--{name} is for measuring, and --from shows what was measured", f"--{name}"
            )
    return read_results(arguments.from_)


def _run_model(arguments: argparse.Namespace, output: Output) -> int:
    """Measure a language model."""
    engine, dtype = _only(arguments, "engine"), _only(arguments, "dtype")
    for name in ("op", "quick", "limit", "compare", "from_", "save"):
        if getattr(arguments, name):
            option = f"--{name.rstrip('_')}"
            raise ConfigurationError(f"{option} is not for --llm", option)
    file = None if arguments.file in (None, "-") else arguments.file
    check_file(file, locate(arguments.llm) if file else None)
    lengths = arguments.context
    loaded = load_model(
        arguments.llm,
        arguments.device,
        engine,
        dtype=dtype,
        context=max(lengths) + WRITTEN if lengths else None,
        silent=arguments.json,
    )
    room = loaded.model.context - WRITTEN
    contexts = lengths or [min(length, room) for length in _CONTEXTS]
    with progress_on(output, silent=arguments.json) as bar:
        speeds = bench_text(loaded.model, list(dict.fromkeys(contexts)), progress=bar.tell)
    data = speeds.to_dict() | loaded.facts()
    if not arguments.json:
        output.say(*loaded.lines(), "", *text_lines(speeds))
    elif file is None:
        output.json(data)
    else:
        write_file(file, json.dumps(data, indent=1) + "\n")
    return 0


def _only(arguments: argparse.Namespace, option: str) -> str | None:
    names: list[str] = getattr(arguments, option) or [None]
    if len(names) > 1:
        raise ConfigurationError(f"one --{option} at a time with --llm, not {names}", option)
    return names[0]


def _counts(text: str) -> list[int]:
    return [count(each.strip()) for each in text.split(",")]


def _save(results: Results, output: Output | None) -> bool:
    problem = save(results)
    if problem:
        complain(problem)
    elif output:
        output.say("", f"Saved in {measurements_file()}; {_effect(results)}")
    return problem is None


def _effect(results: Results) -> str:
    measured = {each.device for each in results.measured}
    devices = [device for device in discover().devices if str(device) in measured]
    if measured_engines(devices):
        return "anydevice config --why shows the effect"
    return "it has an effect once two engines of a device are measured: --engine numpy,torch"
