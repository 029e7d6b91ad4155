"""`anydevice prove`: proves a property for every input, with a certificate to check again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from anydevice.cli.main import ANSWER_IS_NO, NOT_DECIDED, NOT_DONE
from anydevice.cli.options import add_options, add_removed_page, check_place, progress_on, seconds
from anydevice.cli.printing import (
    Output,
    check_file,
    complain,
    error_in_json,
    problem_of,
    write_file,
)
from anydevice.errors import AnyDeviceError, ConfigurationError

EXAMPLE = "anydevice prove net.onnx property.vnnlib --timeout 116 --certificate p.proof"

_PROVED = 0
_EXIT_CODES = {"proved": _PROVED, "counterexample": ANSWER_IS_NO, "undecided": NOT_DECIDED}
_PARTS = 1000
"""Steps of the progress bar."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an ONNX file")
    words = "a VNN-LIB file, 1.0 or 2.0; or give --ball, --eps and --label"
    parser.add_argument("property", metavar="PROPERTY", nargs="?", help=words)
    parser.add_argument(
        "--precision",
        choices=("float32", "real"),
        default="float32",
        help="float32: for every execution in float32, in any order (the default); "
        "real: in exact arithmetic",
    )
    results = "write the outcome as VNN-COMP wants it: sat, unsat, timeout, unknown or error; the "
    results += "exit code is 0 whatever was found"
    add_options(
        parser,
        ("--ball", "X.npy", str, "for every input close to this one: its class stays the same"),
        ("--eps", "RADIUS", float, "the largest change of each number of --ball"),
        ("--label", "CLASS", int, "the output that is to be the largest in --ball"),
        ("--low", "NUMBER", float, "the smallest valid input, such as 0 for images"),
        ("--high", "NUMBER", float, "the largest valid input, such as 1 for images"),
        ("--timeout", "SECONDS", partial(seconds, high=1e9), "after which it stays undecided"),
        ("--certificate", "FILE", str, "write the proof there"),
        ("--check", "FILE", str, "check a certificate again; 3 if the reading was not compared"),
        ("--unpack", "MIB", int, "the most that --check unpacks a certificate to; 64 by default"),
        ("--results", "FILE", str, results),
        ("--device", "DEVICE", str, "where to compute, such as cuda:0"),
        ("--engine", "ENGINE", str, "with which library, such as torch"),
    )
    add_removed_page(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Prove or check, and print; return 0: proved, 1: counterexample, 3: undecided, 2: error."""
    check_file(arguments.results, *_read(arguments))
    try:
        code = _check(arguments, output) if arguments.check else _prove(arguments, output)
    except AnyDeviceError as error:
        if arguments.json:
            output.json(error_in_json(error))
        else:
            complain(error)
        with suppress(AnyDeviceError):  # it may be this file that cannot be written
            _write_result(arguments.results, "error")
        return NOT_DONE  # without memory, too: 1 would be a counterexample
    return _PROVED if arguments.results and code != NOT_DONE else code


def _prove(arguments: argparse.Namespace, output: Output) -> int:
    check_file(arguments.certificate, *_read(arguments))
    check_place(None if arguments.device is None else [arguments.device], arguments.engine)
    claim = _claim(arguments)
    from anydevice._proofs.prove import prove

    with progress_on(output, silent=arguments.json) as bar:

        def tell(now: Any) -> None:
            doing = f"{now.open:,} open, {now.boxes_per_second:,.0f}/s, bound {now.worst:.3g}"
            bar.tell(int(now.share * _PARTS), _PARTS, doing)

        result = prove(
            arguments.model,
            *claim,
            precision=arguments.precision,
            limit=arguments.timeout,
            device=arguments.device,
            engine=arguments.engine,
            progress=tell,
        )
    return _finish(result, arguments, output)


def _read(arguments: argparse.Namespace) -> tuple[str | None, ...]:
    return arguments.model, arguments.property, arguments.ball, arguments.check


def _claim(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the property and its region, of a file or of a ball."""
    ball = {name: getattr(arguments, name) for name in ("ball", "eps", "label", "low", "high")}
    given = [name for name, value in ball.items() if value is not None]
    if given[:3] != ["ball", "eps", "label"] if arguments.property is None else given:
        text = "required: PROPERTY, a VNN-LIB file, or --ball x.npy --eps 0.03 --label 3, not both"
        raise ConfigurationError(text, source="PROPERTY")
    if arguments.property is not None:
        return arguments.property, None
    from anydevice._proofs import files, properties

    ends = {name: ball[name] for name in given[3:]}
    centre = files.read_array(arguments.ball)
    return properties.same_class(arguments.label), properties.ball(centre, arguments.eps, **ends)


def _finish(result: Any, arguments: argparse.Namespace, output: Output) -> int:
    """Print the result, whether or not its files can be written; return the exit code."""
    from anydevice._proofs.prove import outcome_data

    outcome = outcome_data(result)
    kind = outcome["result"]
    if kind == "counterexample" and arguments.property:
        outcome |= _conditions(arguments.property, outcome)
    problems = _write_files(result, outcome, arguments)
    if arguments.json:
        output.json(outcome | _problems_in_json(problems))
    else:
        style = {"proved": "good", "counterexample": "bad"}.get(kind, "strong")
        output.say(f"{output.paint(kind, style)} {_words(outcome)}")
        for problem in problems:
            output.complain(problem)
    return NOT_DONE if problems else _EXIT_CODES[kind]


def _conditions(path: str, outcome: dict[str, Any]) -> dict[str, list[str]]:
    from anydevice._proofs.files import read_queries
    from anydevice._report.proof import violated_conditions

    try:
        return {"violated": violated_conditions(read_queries(path), outcome["x"], outcome["y"])}
    except AnyDeviceError:  # the file is another one by now: the outcome stands
        return {}


def _write_files(
    result: Any, outcome: dict[str, Any], arguments: argparse.Namespace
) -> list[AnyDeviceError]:
    """Write the requested files; return the errors of those that could not be written."""

    def certificate() -> None:
        proved = outcome["result"] == "proved"
        saved = result.save(arguments.certificate) if proved else ()
        outcome["certificate"] = [str(path) for path in saved]

    def results() -> None:
        _write_result(arguments.results, _for_vnncomp(outcome))

    wanted = {certificate: arguments.certificate, results: arguments.results}
    problems = [problem_of(write) for write, path in wanted.items() if path is not None]
    return [problem for problem in problems if problem is not None]


def _problems_in_json(problems: Sequence[AnyDeviceError]) -> dict[str, object]:
    if not problems:
        return {}
    return error_in_json(problems[0]) | {"error": "; ".join(map(str, problems))}


def _words(outcome: dict[str, Any]) -> str:
    from anydevice._report.proof import counterexample_text, outcome_text

    lines = [outcome_text(outcome)]
    why = "only a proof has one"
    if outcome["result"] == "counterexample":
        lines += counterexample_text(outcome)
        why = "a counterexample has none; x and y show it"
    if "certificate" in outcome:
        lines += [f"certificate  {path}" for path in outcome["certificate"] or [f"none: {why}"]]
    return "\n  ".join(lines)


def _for_vnncomp(outcome: dict[str, Any]) -> str:
    if outcome["result"] == "proved":
        return "unsat"
    if outcome["result"] == "undecided":
        return "timeout" if outcome["reason"] == "time" else "unknown"
    pairs = [f"(X_{k} {value!r})" for k, value in enumerate(outcome["x"])]
    pairs += [f"(Y_{k} {value!r})" for k, value in enumerate(outcome["y"])]
    return "sat\n(" + "\n".join(pairs) + ")"


def _write_result(path: str | None, text: str) -> None:
    if path is not None:
        write_file(path, f"{text}\n")


def _check(arguments: argparse.Namespace, output: Output) -> int:
    from anydevice._proofs.checking.smooth import executors_of
    from anydevice._proofs.execution import NOT_COMPARED, compare_reading, executors
    from anydevice._proofs.files import check, read_certificate, read_model, read_queries
    from anydevice._proofs.properties import problems
    from anydevice._report.proof import in_parts, theorem_text

    if arguments.certificate:
        raise ConfigurationError("--check reads a certificate, and --certificate writes one")
    model = read_model(arguments.model)
    claim, region = _claim(arguments)
    if region is None:
        queries: Sequence[Any] = read_queries(claim, model)
    else:
        queries = [part.query for part in problems(claim, model.network, region)]
    certificate = read_certificate(arguments.check, arguments.unpack)
    leaves, refused, is_compared = 0, None, bool(executors())
    if is_compared:
        compare_reading(model, queries)
    try:
        leaves = check(model, queries, certificate, arguments.check)
    except AnyDeviceError as error:
        refused = error
    verdict = "error" if refused else "unsat" if is_compared else "unknown"
    problem = problem_of(lambda: _write_result(arguments.results, verdict))
    result = "refused" if refused else "proved" if is_compared else "checked"
    about: dict[str, Any] = {"result": result, "parts": leaves, "precision": certificate.arithmetic}
    about |= {"executors": executors_of(certificate.assumptions), "logits": model.softmax}
    about["assumptions"] = dict(certificate.assumptions)
    if arguments.json:
        output.json(about | _problems_in_json([item for item in (refused, problem) if item]))
    else:
        if not refused:
            proved = f"{output.paint('proved', 'good')} again" if is_compared else NOT_COMPARED
            theorem = f"in {certificate.arithmetic}{theorem_text(about)}"
            output.say(f"{proved}, {theorem}, {in_parts(leaves)}")
        output.complain(refused)
        output.complain(problem)
    if problem:
        return NOT_DONE
    return ANSWER_IS_NO if refused else _PROVED if is_compared else NOT_DECIDED
