"""The pytest plugin, as a project of somebody else uses it: each test runs pytest in a process."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import anydevice
from anydevice._machine.engines import registry

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "testing-your-code.md"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest on a file with this text, its warnings being errors."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    others = ("hypothesispytest", "jaxtyping", "xdist", "cov", "platformdirs", "anyio")

    def run(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(text)
        off = (part for name in others for part in ("-p", f"no:{name}"))
        strict = ("--strict-markers", "-W", "error", "-rs", "-v", *off)
        return pytester.runpytest_subprocess(*strict, *options)

    return run


def ids(result: pytest.RunResult, outcome: str) -> set[str]:
    return set(re.findall(rf"::\w+\[(.+)\] {outcome}", result.stdout.str()))


def test_the_page_is_true(run: Run) -> None:
    section = PAGE.read_text("utf-8").partition("## In pytest")[2]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    # The other engines are those of the next test: here they would only take time to start.
    result = run("import numpy\n" + "\n".join(blocks), "--anydevice-engines=numpy")
    outcomes = result.parseoutcomes()
    assert not outcomes.keys() & {"failed", "errors", "warnings"}
    assert outcomes["passed"] + outcomes.get("skipped", 0) == 5
    assert ids(result, "PASSED") == {"numpy-cpu"}


ON_EACH = """
import pytest, sys
from anydevice import device_of
import numpy

@pytest.fixture(scope="module")
def placed(anydevice_device):
    return anydevice_device, anydevice_device(numpy.ones(2, "float32"))

def test_each(placed, request):
    device, x = placed
    assert device_of(x) == device and device_of(x).engine == device.engine
    assert request.node.callspec.id == f"{device.engine}-{device}"

@pytest.mark.anydevice_engines("jax", "numpy")
def test_some(anydevice_device):
    assert anydevice_device.engine in ("jax", "numpy")
"""


def test_a_test_runs_on_every_engine_and_backend(run: Run) -> None:
    result = run(ON_EACH)
    cpu = anydevice.device("cpu").status
    ran = ids(result, "PASSED")
    assert {f"{engine}-cpu" for engine in cpu.engines} <= ran
    first = {each.backend: each for each in reversed(anydevice.devices()) if each.status}
    assert len(ran) == sum(len(each.status.engines) for each in first.values() if each.status)
    assert len(re.findall(r"test_some\[", result.stdout.str())) >= 2
    assert "failed" not in result.parseoutcomes()


def test_an_engine_that_is_required_and_cannot_run_is_a_failure(run: Run) -> None:
    missing = [name for name in registry.engine_names() if not registry.version_of(name)]
    if not missing:
        pytest.skip("every engine is installed here")
    text = "def test_it(anydevice_device): assert anydevice_device.engine == 'numpy'"
    wanted = f"numpy,{missing[0]}"
    required = run(text, f"--anydevice-engines={wanted}")
    required.assert_outcomes(passed=1, errors=1)
    required.stdout.fnmatch_lines(["*cannot run here: it is not installed (fix: pip install *"])
    mark = f"import pytest\n@pytest.mark.anydevice_engines(*{wanted.split(',')})\n{text}"
    run(mark).assert_outcomes(passed=1, skipped=1)


def test_a_missing_device_skips_with_the_reason_of_its_finding(run: Run) -> None:
    finding = next(each for each in anydevice.discover() if not each.usable)
    result = run(
        f"""
        import pytest

        @pytest.mark.needs_device("{finding.backend}")
        def test_without(): raise AssertionError

        @pytest.mark.needs_device("cpu", count=100)
        def test_many(): raise AssertionError

        @pytest.mark.needs_device("cpu", min_free=1)
        def test_with(): pass

        @pytest.mark.needs_device("cqu")
        def test_misspelled(): pass

        @pytest.mark.needs_device(cound=2)
        def test_of_nothing(): pass
        """
    )
    result.assert_outcomes(skipped=2, passed=1, errors=2)
    said = result.stdout.str()
    reason = str(finding.reason)
    assert re.search(rf"SKIPPED \[1\] \S+missing\S+\.py:\d+: .*{re.escape(reason)}", said)
    assert re.search("100 devices 'cpu' are needed, and [0-9]+ can be used here", said)
    assert "there is no backend 'cqu'" in said
    assert "needs_device(cound=…): it takes one device" in said


def test_a_fake_machine_ends_with_its_test(run: Run) -> None:
    result = run(
        """
        from anydevice import device, discover

        def machine(): return [str(each) for each in discover().devices]
        real = machine()

        def test_fake(fake_machine):
            report = fake_machine(cuda=2)
            assert machine()[:2] == ["cuda:0", "cuda:1"] and report["cuda"].usable
            fake_machine(tpu=1)
            assert str(device()) == "tpu:0" and not discover()["cuda"].usable

        def test_afterwards():
            assert machine() == real
        """
    )
    result.assert_outcomes(passed=2)


def test_unused_it_imports_nothing(run: Run) -> None:
    result = run(
        """
        import sys

        def test_it(request):
            assert request.config.pluginmanager.hasplugin("anydevice")
            assert "_anydevice_pytest" in sys.modules
            heavy = ("anydevice", "numpy", "torch", "jax", "mlx", "pyopencl")
            assert not [name for name in heavy if name in sys.modules]
        """
    )
    result.assert_outcomes(passed=1)


def test_an_installed_package_has_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (module,) = project["project"]["entry-points"]["pytest11"].values()
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert f"src/{module}.py" in wheel["only-include"]
    assert (ROOT / "src" / f"{module}.py").exists()
