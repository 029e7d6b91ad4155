"""Chat templates: what Hugging Face gives them, and limits that hold whatever they do."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import pytest

from anydevice._llm import template as chat_template
from anydevice._llm.template import ChatTemplate, tool_schema
from anydevice.errors import ConfigurationError, UnsupportedError

pytest.importorskip("jinja2")

REAL = Path(__file__).parents[2] / ".cache" / "templates"
CONVERSATIONS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("conversations.json").read_text("utf-8")
)
"""Plain ones, and all that people and programs put into them."""
HELLO = [{"role": "user", "content": "Hello"}]

# Each uses what templates are given; transformers must write the same.
FEATURES = {
    "blocks are trimmed": """{% for m in messages %}
  {% if true %}
{{ m.role }}
  {% endif %}
{% endfor %}
""",
    "tojson": """{{ tools | tojson }}{{ tools|tojson(indent=2) }}
{{ '<é>'|tojson(ensure_ascii=true) }}
{{ {'b': 1, 'a': [1.5, none, true]}|tojson(separators=(',', ':'), sort_keys=true) }}""",
    "loop controls": """{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}
{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}""",
    "generation": """{% for m in messages %}
{% generation %}{{ m.content }}
{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}""",
    "namespaces": """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{% endfor %}{{ ns.n }}{{ dict(a=ns.n) }}{{ dict.fromkeys([1, 2], 3) }}""",
    "only some of a class": "{{ dict.keys({'a': 1})|list }}",
    "private names": "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns }}",
    "private names at once": "{{ namespace(_x=1)._x }}",
    "time": "{{ strftime_now('%Y-%m-%d') }}",
    "macros": """{% macro say(m, end='!') %}
{{ m.role|upper }}: {{ caller() if caller else m.content }}{{ end }}{% endmacro %}
{% for m in messages %}{{ say(m) }}{{ say(m, end='?') }}{% call say(m) %}x{% endcall %}{% endfor %}
""",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ pad_token is defined }}",
    "methods": """{{ messages[0].content.strip().split('l')[-1].title() }}
{{ messages[-1]['role'][:2] }}{{ messages[0].items()|list }}
{{ '{:>4}|%s'.format(1) % 'a' }}{{ 'a,b'.split(',')|join('-') }}""",
    "filters": """{{ messages|map(attribute='role')|unique|join(',') }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 'a\nb'|indent(2) }}
{{ [3, 1]|sort }}{{ 'x'|default('y') }}""",
    "tests": """{{ x is defined }}{{ messages is iterable }}{{ messages[0].content is string }}
{{ none is none }}{{ 1 in [1] }}{{ messages is mapping }}{{ 5 is divisibleby 5 }}""",
    "html": "{{ '<&>' }}{{ '<&>'|e }}{{ '<&>'|tojson }}",
    "prompt": """{% if add_generation_prompt %}assistant:{% endif %}
{{ documents }}{{ tools is none }}""",
    "lists": "{% set x = [1] %}{{ x + [2] }}{{ x.append(3) }}{{ x }}",
    "undefined": "{{ nothing }}{{ nothing.more }}",
    "added to text": "{{ 'a' + none }}",
    "inner names": "{{ messages.__class__ }}{{ ''.__class__.__mro__ }}{{ cycler('a').next() }}",
    "includes": "{% include 'other' %}",
}


def ours(template: str, case: dict[str, Any], prompt: bool) -> str | ConfigurationError:
    try:
        return ChatTemplate(template, "t").render(
            **case, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
        )
    except ConfigurationError as error:
        return error


def theirs(template: str, case: dict[str, Any], prompt: bool) -> str | Exception:
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {key: value for key, value in case.items() if key != "messages"}
    given |= {"chat_template": template, "add_generation_prompt": prompt}
    try:
        texts, _ = render_jinja_template(
            [case["messages"]], bos_token="<s>", eos_token="</s>", **given
        )
    except Exception as error:
        return error
    return str(texts[0])


def assert_same(template: str, case: dict[str, Any], prompt: bool) -> None:
    from jinja2 import TemplateError

    expected, got = theirs(template, case, prompt), ours(template, case, prompt)
    if isinstance(expected, str):
        assert got == expected
        return
    assert isinstance(got, ConfigurationError)
    if type(expected) is TemplateError:  # raised by the template itself
        assert str(expected)[:150] in str(got)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_template_writes_what_it_writes_in_transformers(feature: str) -> None:
    for case in CONVERSATIONS.values():
        for prompt in (True, False):
            assert_same(FEATURES[feature], case, prompt)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% generation %}{{ messages|tojson }}{% endgeneration %}", ("rendered", '["é<"]')),
        ("{{ raise_exception('No') }}", ("refused", "No")),
        ("{{ x.y }}", ("failed", "'x' is undefined")),
        ("{{ 1 + 'a' }}", ("failed", "TypeError: ")),
        ("{{ namespace(_a=1) }}{{ dict(a=1) }}", ("failed", "a namespace takes no private name")),
        ("{{ dict.fromkeys([1]) }}{{ strftime_now('%%') }}", ("rendered", "{1: None}%")),
        ("a\n{% if", ("syntax", "line 2: ")),
        ("{{ 'a' * 4194305 }}", ("long", "")),
    ],
)
def test_the_child_says_how_it_went(template: str, expected: tuple[str, str]) -> None:
    kind, text = chat_template._render(template, {"messages": ["é<"]})
    assert kind == expected[0]
    assert text.startswith(expected[1])


@pytest.mark.soak
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_real_templates_write_what_they_write_in_transformers(name: str) -> None:
    files = sorted(REAL.glob("*.jinja"))
    if not files:
        pytest.skip(f"there are no templates in {REAL}; make soak fetches them")
    for file in files:
        for prompt in (True, False):
            assert_same(file.read_text("utf-8"), CONVERSATIONS[name], prompt)
    assert len(files) >= 70


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "is damaged: line 1: "),
        ("\n\n{% for %}", "is damaged: line 3: "),
        ("{{ x.y }}", "cannot write these messages: 'x' is undefined"),
        ("{{ 1 / 0 }}", "cannot write these messages: ZeroDivisionError: "),
        ("{{ raise_exception('No role, please') }}", "refuses these messages: No role, please$"),
    ],
)
def test_a_broken_or_refusing_template_is_named(template: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match="^the chat template of here " + words):
        ChatTemplate(template, "here").render(HELLO)


ANYTHING = SimpleNamespace()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages are a list of dicts"),
        ("Hello", "messages are a list of dicts"),
        ({"role": "user"}, "messages are a list of dicts"),
        (["Hello"], r"messages\[0\] is not a dict"),
        ([{"role": "user", "content": ANYTHING}], r"\[0\]\['content'\] is of type SimpleNamespace"),
        ([{SimpleNamespace: 1}], r"messages\[0\]: the key"),
    ],
)
def test_messages_that_are_none_are_named(messages: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ChatTemplate("", "here").render(messages)


@dataclass
class Message:
    role: str
    content: Any


def test_messages_of_other_kinds_are_plain_to_a_template() -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m }};{% endfor %}"
    dumped = SimpleNamespace(model_dump=lambda: {"role": "user", "content": ("a", ["b"])})
    case = {"messages": [Message("user", {"a": (1, True)}), dumped]}
    assert ours(template, case, True) == theirs(template, case, True)


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigurationError, match="nested more than 100 levels"):
        ChatTemplate("", "here").render([{"role": "user", "content": endless}])


# --- limits -----------------------------------------------------------------------------------

TO_AN_ERROR = {
    "product": "{{ 'a' * 10**9 }}",
    "larger product": "{{ 'a' * 10**18 }}",
    "list": "{{ ([0] * 10**9)|length }}",
    "doubling": """{% set ns = namespace(x='ab') %}
{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}""",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "inner format": "{{ '{:{}}'.format(1, 999999999) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "methods": "{{ 'a'.ljust(10**9) }}{{ 'a'.zfill(10**9) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10**8) }}",
    "replace": "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "join": "{{ ('x' * 10**5).join(['y'] * 10**5) }}",
    "indent": "{{ '\n\n'|indent(10**9, blank=true) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "range": "{{ range(10**9)|list|length }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big')|length }}",
    "text": "{{ 'a' * 4194305 }}",
    "long text": "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
    "deep brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep lists": "{{ " + "[" * 20000 + "]" * 20000 + " }}",
    "long chain": "{{ a" + ".b" * 50000 + " }}",
    "many signs": "{{ " + "-" * 50000 + "1 }}",
    "many blocks": "{% if 1 %}" * 20000 + "{% endif %}" * 20000,
    "many loops": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
}
TO_THE_LIMIT = {
    "loops": "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (9**(9**9)) % 7 }}",
    "calls": """{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}
{{ f(60) }}""",
    "tree": """{% set ns = namespace(x=[]) %}
{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}""",
    "comparison": """{% set a = namespace(x=[]) %}{% set b = namespace(x=[]) %}
{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}
{{ a.x == b.x }}""",
    "lipsum": "{{ lipsum(n=10**7) }}",
    "sum": "{{ range(99999)|map('string')|map('length')|sum }}" * 2000,
}


def child() -> psutil.Process:
    process = chat_template._child()._process
    assert process is not None
    return psutil.Process(process.pid)


def assert_stopped(template: str, *, within: float) -> str:
    """The error, no later than that; the next template is written as if nothing was."""
    began = time.monotonic()
    with pytest.raises(ConfigurationError) as caught:
        ChatTemplate(template, "hostile.jinja").render(HELLO)
    assert time.monotonic() - began < within
    assert "hostile.jinja" in str(caught.value)
    assert ChatTemplate("{{ messages[0].content }}", "good").render(HELLO) == "Hello"
    if sys.platform == "linux":
        peak = int(Path(f"/proc/{child().pid}/status").read_text().split("VmHWM:")[1].split()[0])
        assert peak * 1024 < chat_template.MEMORY + 100 * 2**20
    return str(caught.value)


@pytest.mark.parametrize("case", TO_AN_ERROR)
def test_a_template_cannot_take_memory_or_break_the_process(case: str) -> None:
    if sys.platform != "linux" and case not in ("recursion", "long text", "range"):
        pytest.skip("only Linux limits the memory of a process")
    assert_stopped(TO_AN_ERROR[case], within=60)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates may take a quarter of a second."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.25)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("case", TO_THE_LIMIT)
def test_a_template_that_does_not_end_is_stopped(case: str) -> None:
    assert "took more than 0.25 s" in assert_stopped(TO_THE_LIMIT[case], within=60)


@pytest.mark.soak
@pytest.mark.parametrize("case", TO_THE_LIMIT)
def test_a_template_is_stopped_within_ten_seconds(case: str) -> None:
    assert_stopped(TO_THE_LIMIT[case], within=10)


def test_a_child_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "good")
    template.render(HELLO)
    before = child()
    before.kill()
    before.wait(60)
    assert template.render(HELLO) == "Hello"
    assert child() != before


def test_without_jinja2_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('none')")
    monkeypatch.syspath_prepend(tmp_path)
    child = chat_template._child.__wrapped__()
    monkeypatch.setattr(chat_template, "_child", lambda: child)
    with pytest.raises(UnsupportedError, match=r'pip install "\.\[llm\]" in a clone'):
        ChatTemplate("", "here").render(HELLO)
    child.close()


# --- tools ------------------------------------------------------------------------------------


def plain(city: str, days: int = 1) -> str:
    """The weather.

    Args:
        city: where,
            as people say it
        days: how many
    """
    return ""


def rich(
    a: list[int],
    b: dict[str, float] | None,
    c: Literal["x", "y"],
    d: int | str,
    e: tuple[int, str],
    f: list[dict[str, Any]] | int = 3,
    g: bool = False,
) -> list[str]:
    """
    Does much.

    In two paragraphs.

    Args:
        a: numbers
        b: table: of values
        c: one of two
        d: either (choices: [1, "two"])
        e: pair
        f: many
        g: flag

    Returns:
        What was done.
    """
    return []


def nothing() -> None:
    """No parameter."""


@pytest.mark.parametrize("tool", [plain, rich, nothing])
def test_a_function_is_described_as_transformers_describes_it(tool: Any) -> None:
    from transformers.utils import get_json_schema

    assert tool_schema(tool) == get_json_schema(tool)
    template = ChatTemplate("{{ tools|tojson }}", "here")
    assert template.render(HELLO, tools=[tool]) == template.render(
        HELLO, tools=[get_json_schema(tool)]
    )


def tool(name: str, kind: Any, described: str = "a: a thing") -> Any:
    """A function of one parameter `a`, with this type if any, and these words under Args."""

    def made(a: Any) -> None: ...

    made.__name__, made.__doc__ = name, f"Does something.\n\nArgs:\n    {described}\n"
    made.__annotations__ = {"return": None} if kind is None else {"a": kind, "return": None}
    return made


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (tool("unread", "NoSuchType"), "the tool unread has types that cannot be read"),
        (
            tool("unlisted", str, "a: a thing (choices: [one, two])"),
            r"the tool unlisted has choices that are not JSON: \[one, two\]",
        ),
        (tool("odd", set[int]), "the tool odd has a parameter of type"),
        (tool("untold", int, ""), "the tool untold does not describe a under Args:"),
        (tool("untyped", None), "the tool untyped has no type for a"),
        (lambda: None, "has no docstring"),
        (3, "a tool is a JSON schema or a function, not 3"),
    ],
)
def test_a_tool_that_cannot_be_described_is_named(wrong: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        tool_schema(wrong)
