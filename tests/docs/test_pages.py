"""What the pages on parts of the library say of the code is true; their examples run elsewhere."""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import _ops, benchmark, llm, nn, ops, verify, warm_up
from anydevice._arrays.memory.stats import pressure_of
from anydevice._arrays.stage import _BUFFERS, CHUNK, MOST_LANES
from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.primitives import PrimitivesOf
from anydevice._llm import decoder, sampling
from anydevice._machine.engines.registry import BUILT_IN
from anydevice._machine.settings.config import STRATEGIES
from anydevice._ops import dispatch
from anydevice._ops.trusted_kernels import kernels_of
from anydevice._plan.cards import CARDS
from anydevice._plan.estimates import PARTS
from anydevice._plan.families import ARCHITECTURES
from anydevice._plan.training import OPTIMIZERS
from anydevice.cli import chat

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


CHAT, COMPUTING = page("language-models.md"), page("computing.md")
MEMORY, REFERENCE = page("memory.md"), page("reference.md")
NOT_OF_COMPUTING = {"collectives"}
"""What engines lack that no op needs."""


def section(text: str, title: str) -> str:
    part = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert part, title
    return part


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table with this head, without the marks of code and quotes."""
    lines = text.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert lines, head
    return [[cell.strip(' `"') for cell in line.strip("|").split("|")] for line in lines]


# Memory


def test_every_part_of_an_estimate_and_every_card_is_there() -> None:
    assert [cells[0] for cells in rows(MEMORY, "part | what it is")][:-1] == list(PARTS)
    cards = section(MEMORY, "A training on many cards").upper()
    assert [name for name in CARDS if name not in cards] == []


def test_strategies_and_limits_are_those_of_the_code() -> None:
    shown = {
        name: text.partition(" %")[0]
        for name, text in rows(MEMORY, "setting | of a device's memory")
    }
    assert shown == {name: f"{share:.0%}".rstrip("%") for name, share in STRATEGIES.items()}
    named = [cells[0] for cells in rows(MEMORY, "library | how it is limited")]
    assert sorted(named) == sorted(BUILT_IN)


def test_pressure_and_optimizers_are_those_of_the_code() -> None:
    shown = rows(MEMORY, "pressure | taken")
    limits = [int(found[0]) for _, text in shown if (found := re.findall(r"\d+", text))]
    for (name, _), (below, _), most in zip(shown, shown[1:], limits, strict=False):
        assert pressure_of(1000, 1000 - 10 * most + 1) == name
        assert pressure_of(1000, 1000 - 10 * most) == below
    assert len(limits) == len(shown) - 1
    sentence = MEMORY.partition("The optimizers are ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", sentence) == list(OPTIMIZERS)


@pytest.mark.parametrize(
    "name",
    [
        *("MemoryEstimate", "MemoryStats", "cpu_fallback", "estimate_inference"),
        *("estimate_training", "find_batch_size", "memory_stats", "plan_inference", "release"),
    ],
)
def test_every_function_of_memory_is_in_the_reference_and_on_the_page(name: str) -> None:
    value = getattr(anydevice, name)
    assert f"::: {value.__module__}.{name}\n" in REFERENCE
    assert isinstance(value, type) or f"{name}(" in MEMORY or f"@{name}\n" in MEMORY


# Moving


def test_the_table_of_libraries_follows_from_which_library_drives_what() -> None:
    lines = re.findall(r"^\| .*\|$", page("moving.md").partition("## Which array")[2], re.MULTILINE)
    head, *table = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[:7]]
    assert set(head[1:]) == set(BACKENDS)
    assert [row[0] for row in table] == list(BUILT_IN)
    for library, *ends in table:
        for backend, end in zip(head[1:], ends, strict=True):
            stays = library != "numpy" and library in BACKENDS[backend].engines
            assert end == (library if stays else "the engine's"), (library, backend)


def test_the_size_of_a_ring_is_that_of_the_code() -> None:
    most = MOST_LANES * _BUFFERS * CHUNK // 2**20
    assert f"at most {most} MiB" in page("moving.md")
    assert MOST_LANES == 12, "the page says twelve"


# Models and language models


def test_every_public_name_of_nn_is_in_the_reference_and_nothing_else_is() -> None:
    listed = re.findall(r"^::: (\S+)$", section(REFERENCE, "Models"), re.MULTILINE)
    public = [f"{getattr(nn, name).__module__}.{name}" for name in nn.__all__]
    assert sorted(listed) == sorted([*public, "anydevice._train.history.Epoch"])


def test_every_example_is_on_the_page() -> None:
    listed = re.findall(r"^\| `(examples/\w+\.py)` \|", page("models.md"), re.MULTILINE)
    there = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")]
    assert sorted(listed) == sorted(there)


def test_the_families_are_those_of_the_table() -> None:
    families = " ".join(cells[0] for cells in rows(CHAT, "`model_type` | models"))
    shown = re.findall(r"(\w+)", families)
    runs = [name for name, row in ARCHITECTURES.items() if row.forward is not None]
    assert sorted(shown) == sorted(runs)


def test_the_options_are_those_of_the_command() -> None:
    parser = ArgumentParser()
    chat.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    sentence = CHAT.partition("\nOptions: ")[2].partition(". ")[0]
    assert set(re.findall(r"`(--[\w-]+)`", sentence)) == known - {"-h", "--help", "--prompt"}


def test_the_commands_of_a_conversation_are_there() -> None:
    shown = [cells[0].strip("`").split()[0] for cells in rows(CHAT, "command | what it does")]
    assert shown == [line.split()[0] for line in chat.HELP if line.startswith("  /")]


def test_every_reason_for_which_a_reply_ends_is_there() -> None:
    said = re.findall(r'`"([a-z ]+)"`', (llm.Reply.__doc__ or "").partition("`tokens`")[0])
    assert [cells[0].strip("`") for cells in rows(CHAT, "`ended` | meaning")] == said


def test_the_order_of_sampling_is_that_of_the_code() -> None:
    order = (sampling.__doc__ or "").partition("The order is")[2].partition("then a")[0]
    steps = re.findall(r"^\d\. `?(\w+)`?", CHAT, re.MULTILINE)[:5]
    places = [order.replace("-", "_").replace(" penalty", "_penalty").find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("file", ["README.md", "docs/index.md", "mkdocs.yml"])
@pytest.mark.parametrize("name", ["models.md", "language-models.md"])
def test_the_pages_on_models_are_found(file: str, name: str) -> None:
    assert re.search(rf"(?<!-){name}", (ROOT / file).read_text("utf-8"))


def test_every_public_name_of_llm_is_in_the_reference() -> None:
    listed = re.findall(r"^::: (\S+)$", section(REFERENCE, "Language models"), re.MULTILINE)
    assert sorted(listed) == sorted(f"anydevice._llm.model.{name}" for name in llm.__all__)


# Computing


def signature(name: str) -> str:
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return f"{name}{inspect.Signature(bare)}"


def test_every_op_is_in_a_table_once_with_its_signature() -> None:
    cells = [cells[0] for cells in table(section(COMPUTING, "The ops"))]
    shown = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    assert sorted(shown) == sorted(signature(name) for name in _ops.__all__)


def test_what_is_unsupported_is_what_the_registry_says() -> None:
    lacking = table(section(COMPUTING, "What is unsupported where"))[1:]
    shown = {(cells[0].strip("`"), cells[1], cells[2]) for cells in lacking}
    assert shown == {
        (name, absent.what, absent.instead)
        for name, row in BUILT_IN.items()
        for what, absent in row.lacks.items()
        if what not in NOT_OF_COMPUTING
    }


def test_the_kernels_of_our_own_are_named() -> None:
    for library in ("torch", "pyopencl"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    triton, opencl = re.findall(r"\(([^()]*)\)", section(COMPUTING, "Our own kernels"))[:2]
    for named, engine, place in ((triton, "torch", "cuda:0"), (opencl, "opencl", "opencl:0")):
        kernels = kernels_of(engine, Device(place))
        assert set(re.findall(r"`(\w+)`", named)) == set(kernels)


def test_a_wrong_softmax_is_told_as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def adds_up_in_16_bits(x: Any, axis: int) -> Any:
        raised = np.exp(x - x.max(axis, keepdims=True))
        return raised / raised.sum(axis, keepdims=True, dtype=x.dtype)

    dispatch.primitives(np.zeros(1))
    wrong = {**dispatch._fused["numpy"], "softmax": adds_up_in_16_bits}
    monkeypatch.setitem(dispatch._fused, "numpy", wrong)
    (cell,) = verify("softmax", engines="numpy", dtypes="bfloat16", isolated=False).wrong
    assert f"\n{cell}\n" in section(COMPUTING, "Is it right here?")


def test_the_decoder_that_it_points_to_is_there() -> None:
    assert "`anydevice._llm.decoder`" in COMPUTING
    assert inspect.getdoc(decoder.forward)


def test_the_primitives_on_the_page_are_those_of_the_code() -> None:
    table = page("engines.md").partition("| kind | primitives |\n")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", table)
    assert named == [name for name in vars(PrimitivesOf) if not name.startswith("_")]


def test_every_op_and_what_checks_them_is_in_the_reference() -> None:
    listed = re.findall(r"^::: anydevice\._ops\.(\w+)\.(\w+)$", REFERENCE, re.MULTILINE)
    modules = {
        name: inspect.unwrap(getattr(ops, name)).__globals__["__name__"] for name in _ops.__all__
    }
    assert {name: f"anydevice._ops.{module}" for module, name in listed} == modules
    assert len(listed) == len(modules)
    for function in (verify, warm_up, benchmark):
        assert f"::: {function.__module__}.{function.__name__}\n" in REFERENCE
