"""`anydevice bench`: the peak rates of this machine, and how close every op comes to them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

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
from anydevice.cli.options import (
    add_filters,
    add_options,
    add_removed_page,
    add_switches,
    count,
    progress_on,
    seconds,
)
from anydevice.cli.printing import Output, check_file, complain, write_file
from anydevice.errors import ConfigurationError

EXAMPLE = "anydevice bench --quick --op matmul,softmax --json"

_CONTEXTS = [128, 512]
"""Default lengths of prompts, in tokens."""
_MEASURING = ("op", "device", "engine", "dtype", "quick", "limit", "save")
"""Options that --from does without."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_filters(parser)
    per_op = f"for one op on one engine ({LIMIT:g}; {QUICK_LIMIT:g} if quick)"
    model = "measure a language model instead: a folder, a GGUF file, or a name in the Hugging "
    model += "Face cache; with one --device, --engine and --dtype"
    lengths = "with --llm: lengths of prompts, such as 512,4k (128, 512)"
    add_options(
        parser,
        ("--limit", "SECONDS", seconds, per_op),
        ("--llm", "MODEL", str, model),
        ("--context", "TOKENS", _counts, lengths),
        ("--compare", "FILE", str, "say what got slower since that --json; exit code 1 if so"),
        ("--from", "FILE", str, "measure nothing: show that --json, as with --compare"),
    )
    add_switches(
        parser,
        quick="one case of each op, and less time for each",
        save="let device() choose engines by these measurements",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="with --json: write it there")
    add_removed_page(parser)


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
    if saved := getattr(arguments, "from"):
        _refuse(arguments, _MEASURING, "is for measuring, and --from shows what was measured")
        results = read_results(saved)
    else:
        results = _measure(arguments, output, silent)
    comparison = compare_runs(old, results) if old is not None else None
    if silent:
        more = {} if comparison is None else {"comparison": comparison.to_dict()}
        output.json(results.to_dict() | more)
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


def _refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise `ConfigurationError` if one of these options is given."""
    for name in names:
        if getattr(arguments, name):
            raise ConfigurationError(f"--{name} {why}", f"--{name}")


def _run_model(arguments: argparse.Namespace, output: Output) -> int:
    engine, dtype = _only(arguments, "engine"), _only(arguments, "dtype")
    _refuse(arguments, ("op", "quick", "limit", "compare", "from", "save"), "is not for --llm")
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
    return [count(part.strip()) for part in text.split(",")]


def _save(results: Results, output: Output | None) -> bool:
    problem = save(results)
    if problem:
        complain(problem)
    elif output:
        measured = {row.device for row in results.measured}
        effect = "it has an effect once two engines of a device are measured: --engine numpy,torch"
        if measured_engines([device for device in discover().devices if str(device) in measured]):
            effect = "anydevice config --why shows the effect"
        output.say("", f"Saved in {measurements_file()}; {effect}")
    return problem is None
