"""A compiled module of PyTorch computes with the module as it is, however that was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import anydevice
from tests.libraries.test_modules import compiled_on_cpu

torch = pytest.importorskip("torch")

X = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)


class Module(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 4)
        self.register_buffer("shift", torch.ones(4))
        self.factor = 1.0

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.factor + self.shift


class Replaced(Module):
    """A class whose `forward` a test may replace."""


def a_step(kind: str, **options: Any) -> Callable[[Any], Any]:
    def change(module: Any) -> None:
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.5, **options)
        module(torch.from_numpy(X)).sum().backward()
        optimizer.step()
        module.zero_grad()

    return change


def doubled(*arguments: Any) -> Any:
    return arguments[-1] * 2


def first_four(x: Any) -> Any:
    return x[:, :4]


FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "AdamW, fused": a_step("AdamW", fused=True),
    "Adam, fused": a_step("Adam", fused=True),
    "SGD, fused": a_step("SGD", fused=True),
    "Adagrad, fused": a_step("Adagrad", fused=True),
    "AdamW, foreach": a_step("AdamW", foreach=True),
    "AdamW, one by one": a_step("AdamW", foreach=False),
    "a buffer, in place": lambda m: m.shift.add_(3),
    "a buffer, another one": lambda m: setattr(m, "shift", torch.zeros(4)),
    "a buffer, in its dict": lambda m: m._buffers.update(shift=torch.zeros(4)),
    "a weight, another one": lambda m: setattr(
        m.inner, "weight", torch.nn.Parameter(torch.ones(4, 16))
    ),
    "a hook": lambda m: m.register_forward_hook(doubled),
    "a hook of a part": lambda m: m.inner.register_forward_hook(doubled),
    "a hook before a part": lambda m: m.inner.register_forward_pre_hook(lambda p, x: (x[0] * 2,)),
    "a hook of all modules": lambda m: torch.nn.modules.module.register_module_forward_hook(
        doubled
    ),
    "forward": lambda m: setattr(m, "forward", first_four),
    "forward of a part": lambda m: setattr(m.inner, "forward", first_four),
    "forward of the class": lambda m: setattr(type(m), "forward", lambda self, x: x[:, :4]),
    "a parametrization": lambda m: torch.nn.utils.parametrize.register_parametrization(
        m.inner, "weight", torch.nn.Softplus()
    ),
}
NEW_CODE = [name for name in FOLLOWED if "hook" in name or "forward" in name]
NOT_FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "a plain attribute": lambda m: setattr(m, "factor", 7.0),
    "NumPy": lambda m: m.inner.weight.detach().numpy().fill(0),
    ".data": lambda m: m.inner.weight.data.zero_(),
    ".data, by vector_to_parameters": lambda m: torch.nn.utils.vector_to_parameters(
        torch.zeros(sum(x.numel() for x in m.parameters())), m.parameters()
    ),
}


@pytest.fixture
def module() -> Iterator[Any]:
    torch.manual_seed(0)
    yield Replaced().eval()
    torch.nn.modules.module._global_forward_hooks.clear()
    if "forward" in vars(Replaced):
        del Replaced.forward


def is_followed(compiled: Any, module: Any) -> bool:
    want = module(torch.from_numpy(X)).detach()
    return torch.allclose(compiled(X).float(), want, atol=0.03 * float(want.abs().max()))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_the_next_call_follows_and_the_verdict_ends(module: Any, name: str, precision: str) -> None:
    compiled = compiled_on_cpu(module, precision=precision, verify=X)
    before = compiled(X).float()
    assert compiled.report.checked is not None
    FOLLOWED[name](module)
    assert is_followed(compiled, module)
    assert not torch.allclose(compiled(X).float(), before, atol=0.03)
    assert compiled.report.checked is None
    assert "no: the model was changed after it was verified" in str(compiled.report)
    assert compiled.verify(X).checked is not None
    assert is_followed(compiled, module)


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["AdamW, fused", *NEW_CODE])
def test_compiled_code_follows_too(module: Any, name: str, precision: str) -> None:
    """Left to itself, code that PyTorch compiled does not look at hooks."""
    compiled = anydevice.compile(module, "cpu", precision=precision)
    compiled(X)
    FOLLOWED[name](module)
    assert is_followed(compiled, module)
    assert compiled.report.made[0].how == "compiled as a whole"


def test_a_hook_that_is_taken_away_is_followed(module: Any) -> None:
    hook = module.inner.register_forward_hook(doubled)
    compiled = compiled_on_cpu(module, precision="bfloat16", verify=X)
    hook.remove()
    assert is_followed(compiled, module)
    assert compiled.report.checked is None


def test_an_equal_tensor_in_the_place_of_another_is_followed(module: Any) -> None:
    """Tensors of one element may be equal, and what is written later goes to the new one."""
    module.shift = torch.ones(1)
    compiled = compiled_on_cpu(module, precision="bfloat16", verify=X)
    compiled(X)
    module.shift = torch.ones(1)
    compiled(X)
    assert compiled.report.checked is None
    module.shift.add_(3)
    assert is_followed(compiled, module)


def test_steps_of_others_change_nothing(module: Any) -> None:
    compiled = compiled_on_cpu(module, precision="bfloat16", verify=X)
    weights = compiled.parameters["inner.weight"]
    FOLLOWED["AdamW, fused"](Module())
    compiled(X)
    assert compiled.report.checked is not None
    assert compiled.parameters["inner.weight"]._version == weights._version, "not copied again"


def test_steps_are_seen_however_many_modules_there_were(module: Any) -> None:
    for _ in range(3):
        compiled = compiled_on_cpu(module, precision="float16")
        compiled(X)
        FOLLOWED["SGD, fused"](module)
        assert is_followed(compiled, module)


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_is_not_followed_is_named_in_the_report(module: Any, name: str) -> None:
    compiled = compiled_on_cpu(module, precision="bfloat16", verify=X)
    NOT_FOLLOWED[name](module)
    assert not is_followed(compiled, module)
    (row,) = [line for line in str(compiled.report).splitlines() if line.startswith("follows")]
    assert name.removeprefix("a ").partition(", by ")[0] in row
    compiled.refresh()
    assert is_followed(compiled, module)
    assert compiled.report.checked is None
    shared = compiled_on_cpu(module, verify=X)
    FOLLOWED["a buffer, in place"](module)
    assert is_followed(shared, module), "where no copy is made, the module itself runs"


def test_a_plain_attribute_ends_the_verdict(module: Any) -> None:
    for precision in ("float32", "bfloat16"):
        compiled = compiled_on_cpu(module, precision=precision, verify=X)
        module.factor += 1.0
        assert compiled.report.checked is None
