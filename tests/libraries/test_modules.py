"""`anydevice.compile` with modules of PyTorch, Flax NNX, Equinox and MLX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice._core.device import Device
from anydevice._libraries.jax.module import EquinoxAdapter
from anydevice._libraries.registry import adapter_of
from anydevice._machine.engines import registry
from anydevice.errors import ConfigurationError, VerificationError
from tests.comparing import assert_close, assert_same_bits

PRECISIONS = ("float32", "float16", "bfloat16", "mixed", "mixed_float16")
X = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)


def torch_module() -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)
            self.inner = torch.nn.Linear(16, 16)
            self.register_buffer("shift", torch.ones(16))
            self.register_parameter("nothing", None)
            self.register_buffer("no_buffer", None)

        def forward(self, x: Any) -> Any:
            return x + torch.relu(self.inner(self.norm(x))) + self.shift

    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(16, 4)).eval()


def nnx_module(dropout: bool = False) -> Any:
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(16, 32, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.last = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    network = Network(nnx.Rngs(0))
    if not dropout:
        network.eval()
    return network


def equinox_module(inner: Any = None) -> Any:
    jax = pytest.importorskip("jax")
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):  # type: ignore[misc]
        first: Any
        rest: list[Any]
        named: dict[str, Any]

        def __call__(self, x: Any) -> Any:
            x = jax.nn.relu(x @ self.first.weight.T)
            for layer in self.rest:
                x = layer(x)
            return self.named["last"](x)

    class Scaled(eqx.Module):  # type: ignore[misc]
        scale: Any
        name: str

        def __call__(self, x: Any) -> Any:
            return x * self.scale

    one, two = jax.random.split(jax.random.key(0))
    first = eqx.nn.Linear(16, 8, key=one)
    return Network(first, [Scaled(jax.random.normal(two, (8,)), "a")], {"last": Scaled(2.0, "b")})


def mlx_module() -> Any:
    layers = pytest.importorskip("mlx.nn")
    return layers.Sequential(
        layers.Linear(16, 8), layers.ReLU(), layers.LayerNorm(8), layers.Linear(8, 4)
    )


MODULES = {
    "torch.nn.Module": ("torch", torch_module, 7),
    "flax.nnx.Module": ("jax", nnx_module, 4),
    "equinox.Module": ("jax", equinox_module, 2),
    "mlx.nn.Module": ("mlx", mlx_module, 4),
}


@pytest.fixture(params=MODULES)
def brought(request: pytest.FixtureRequest) -> tuple[str, str, Any, int]:
    engine, make, parts = MODULES[request.param]
    return request.param, engine, make(), parts


def compiled_on_cpu(module: Any, **options: Any) -> Any:
    return anydevice.compile(module, "cpu", **{"optimize": "none", **options})


def verified(module: Any, example: Any = X, **options: Any) -> Any:
    """What a verification checked."""
    checked = anydevice.compile(module, "cpu", verify=example, **options).report.checked
    assert checked is not None
    return checked


def plainly(module: Any, engine: str) -> Any:
    here = anydevice.device("cpu", engine=engine)
    return anydevice.to_numpy(detached(module(here(X))))


def detached(x: Any) -> Any:
    return x.detach() if hasattr(x, "detach") else x


@pytest.mark.parametrize("precision", PRECISIONS)
def test_modules_are_verified(brought: tuple[str, str, Any, int], precision: str) -> None:
    kind, engine, module, parts = brought
    want = plainly(module, engine)
    compiled = compiled_on_cpu(module, precision=precision, verify=X)
    report = compiled.report
    assert (report.model, report.engine) == (kind, engine)
    assert report.checked is not None
    assert (report.checked.parts, report.checked.reference) == (parts, "float64 on the CPU")
    got = detached(compiled(X))
    name = registry.load(engine).dtype_of(got).name
    assert name == ("float32" if precision.startswith("mixed") else precision)
    error = np.abs(anydevice.to_numpy(got).astype(np.float64) - want).max()
    assert error < (1e-5 if precision == "float32" else 0.1) * np.abs(want).max()
    assert_same_bits(plainly(module, engine), want, because="the module itself stays as it was")


@pytest.mark.parametrize("kind", ["flax.nnx.Module", "equinox.Module", "mlx.nn.Module"])
def test_modules_of_jax_and_mlx_are_compiled(kind: str) -> None:
    engine, make, _ = MODULES[kind]
    module = make()
    want = plainly(module, engine)
    compiled = anydevice.compile(module, "cpu", precision="mixed")
    compiled(X)
    exact = anydevice.compile(module, anydevice.device("cpu", engine="numpy"))
    assert exact.device.engine == engine, "a module stays in its library"
    np.testing.assert_allclose(anydevice.to_numpy(exact(X)), want, rtol=1e-5, atol=1e-6)
    for each in (compiled, exact):
        assert each.report.made[0].how == "compiled as a whole"


@pytest.mark.usefixtures("eager_backend")
def test_modules_of_pytorch_are_compiled() -> None:
    for precision in ("float32", "mixed"):
        compiled = anydevice.compile(torch_module(), "cpu", precision=precision, verify=X)
        assert compiled.report.made[0].how == "compiled as a whole"


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("optimize", ["none", "default"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
def test_pytorch_gives_gradients_if_asked(torch: Any, optimize: str, precision: str) -> None:
    module = torch_module()
    options = {"optimize": optimize, "precision": precision}
    compiled = anydevice.compile(module, "cpu", **options)
    for x in (X, torch.from_numpy(X), X):
        y = compiled(x)
        assert not y.requires_grad
        if precision != "bfloat16":  # which NumPy has not
            assert np.asarray(y).shape == (5, 4)
    assert torch.is_grad_enabled(), "the mode of the program stays"
    asked = torch.from_numpy(X).requires_grad_()
    compiled(asked).sum().backward()
    assert asked.grad is not None, "an input that requires gradients asks for them"
    module.zero_grad()
    compiled = anydevice.compile(module, "cpu", gradients=True, verify=X, **options)
    compiled(X).sum().backward()
    if precision != "bfloat16":  # where the weights are copies
        assert module[2].weight.grad is not None, "gradients pass, as through any module"


def test_a_function_over_a_module_carries_no_gradients_either(torch: Any) -> None:
    module, here = torch_module(), anydevice.device("cpu", engine="torch")
    compiled = anydevice.compile(lambda x: {"y": module(x)}, here, optimize="none")
    assert not compiled(X)["y"].requires_grad
    of_x = torch.func.grad(lambda x: compiled(x)["y"].sum())(torch.from_numpy(X))
    assert of_x.abs().sum() > 0, "who differentiates the call gets gradients"


def test_weights_are_shared_where_nothing_changes() -> None:
    module = torch_module()
    compiled = compiled_on_cpu(module)
    assert compiled.parameters["0.inner.weight"].data_ptr() == module[0].inner.weight.data_ptr()
    assert set(compiled.parameters) == set(module.state_dict())
    half = compiled_on_cpu(module, precision="float16")
    assert str(module[0].inner.weight.dtype) == "torch.float32"
    assert "float16 instead of float32" in half.report.notes[0]


def test_a_module_of_one_example_is_mapped_over_a_batch(jax: Any, eqx: Any) -> None:
    perceptron = eqx.nn.MLP(16, 4, 8, 2, key=jax.random.key(0))
    picture = eqx.nn.Conv2d(3, 2, 3, key=jax.random.key(0))
    for module, x in ((perceptron, X), (picture, np.ones((2, 3, 8, 8), np.float32))):
        for optimize in ("none", "default"):
            compiled = anydevice.compile(module, "cpu", optimize=optimize, verify=x)
            assert_close(compiled(x), jax.vmap(module)(x), terms=64)
            assert_close(compiled(x[0]), module(x[0]), terms=64)
    square = X[:1].repeat(16, 0) + np.eye(16, dtype=np.float32)  # which the module takes as it is
    assert_close(
        anydevice.compile(perceptron, "cpu")(square), jax.vmap(perceptron)(square), terms=64
    )
    with pytest.raises(Exception, match=r"dot_general|matmul") as caught:
        anydevice.compile(perceptron, "cpu")(X[:, :3])
    assert "vmap" not in str(caught.value), "no batch of what it takes"


@pytest.mark.parametrize("how", ["vmap", "vmap twice", "jit", "filter_vmap"])
def test_the_weights_of_a_mapped_module_are_seen(jax: Any, eqx: Any, how: str) -> None:
    module = eqx.nn.MLP(16, 4, 8, 2, key=jax.random.key(0))
    mapped = {
        "vmap": lambda: jax.vmap(module, axis_name="examples"),
        "vmap twice": lambda: jax.vmap(jax.vmap(module), in_axes=1, out_axes=1),
        "jit": lambda: jax.jit(jax.vmap(module)),
        "filter_vmap": lambda: eqx.filter_vmap(module),
    }[how]()
    x = X[None].repeat(3, 0) if how == "vmap twice" else X
    with jax.default_matmul_precision("highest"):  # a card would compute in TF32
        want = np.asarray(mapped(x))
    compiled = anydevice.compile(mapped, "cpu", verify=x)
    assert compiled.model is mapped
    assert compiled.report.checked is not None
    assert compiled.report.checked.weights == len(compiled.parameters) == 6
    assert "6 weights read back" in str(compiled.report)
    np.testing.assert_allclose(np.asarray(compiled(x)), want, rtol=1e-5, atol=1e-6)
    half = anydevice.compile(mapped, "cpu", precision="bfloat16")
    assert {str(weight.dtype) for weight in half.parameters.values()} == {"bfloat16"}
    assert str(half(x).dtype) == "bfloat16"


def test_a_wrong_weight_of_a_mapped_module_is_found(jax: Any, eqx: Any) -> None:
    module = jax.vmap(eqx.nn.MLP(16, 4, 8, 2, key=jax.random.key(0)))
    compiled = compiled_on_cpu(module)
    arguments = compiled._adapter.arguments
    arguments[2] = arguments[2] + 1e-3
    with pytest.raises(VerificationError, match=r"layers\[1\]\.weight: the weight on the device"):
        compiled.verify(X)


def test_a_function_claims_no_weights() -> None:
    here = anydevice.device("cpu", engine="numpy")
    report = anydevice.compile(lambda x: x * 2, here, verify=X).report
    assert report.checked is not None
    assert "weights" not in str(report)


def test_training_mode_is_said_and_not_verified(torch: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Dropout(0.5))
    compiled = compiled_on_cpu(module)
    assert "in training mode" in compiled.report.notes[0]
    with pytest.raises(ConfigurationError, match=r"1 is in training mode.*model\.eval"):
        compiled.verify(X)
    with pytest.raises(ConfigurationError, match=r"dropout is in training mode"):
        anydevice.compile(nnx_module(dropout=True), "cpu", verify=X)


def test_chance_without_a_layer_of_its_own_is_not_verified(torch: Any) -> None:
    """The numbers here are three times too large, and the chance of dropout must not hide it."""

    class Wrong(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            y = x if x.dtype == torch.float64 else x * 3
            return torch.nn.functional.dropout(y, 0.5, self.training)

    with pytest.raises(ConfigurationError, match=r"differs from run to run.*model\.eval"):
        anydevice.compile(Wrong(), "cpu", optimize="none", verify=X)
    with pytest.raises(VerificationError):
        anydevice.compile(Wrong().eval(), "cpu", optimize="none", verify=X)


def test_chance_in_mlx_is_noted_not_verified_and_new_in_every_call() -> None:
    core, layers = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.nn")
    module = layers.Sequential(layers.Linear(16, 64), layers.Dropout(0.5))
    compiled = anydevice.compile(module, "cpu")
    x = core.array(X)
    one, two = (anydevice.to_numpy(compiled(x)) for _ in range(2))
    assert compiled.report.made[0].how == "compiled as a whole"
    assert (one != two).any()
    assert "in training mode" in compiled.report.notes[0]
    with pytest.raises(ConfigurationError, match=r"layers\.1 Dropout differs from run to run"):
        compiled.verify(X)
    module.eval()
    one, two = (anydevice.to_numpy(compiled(x)) for _ in range(2))
    assert_same_bits(one, two, because="one program ran twice: the mode is followed")
    assert compiled.report.notes == ()
    assert compiled.verify(X).checked is not None


def test_training_mode_in_jax_is_noted() -> None:
    notes = anydevice.compile(nnx_module(dropout=True), "cpu", optimize="none").report.notes
    assert any("training mode" in note and "the same in every call" in note for note in notes)
    eqx = pytest.importorskip("equinox")
    module = eqx.nn.Sequential([eqx.nn.Lambda(abs), eqx.nn.Dropout(0.5)])
    compiled = compiled_on_cpu(module)
    assert "inference_mode" in compiled.report.notes[0]
    words = r"layers\[1\] is in training mode.*inference_mode"
    with pytest.raises(ConfigurationError, match=words):
        compiled.verify(X)
    calm = anydevice.compile(eqx.nn.inference_mode(module), "cpu", optimize="none", verify=X)
    assert calm.report.notes == ()


def doubled(module: Any, engine: str) -> None:
    """Make every weight of a module twice as large, as its own library does it."""
    if engine == "torch":
        with pytest.importorskip("torch").no_grad():
            for x in module.parameters():
                x *= 2
    elif engine == "jax":
        nnx, jax = pytest.importorskip("flax.nnx"), pytest.importorskip("jax")
        nnx.update(module, jax.tree.map(lambda x: x * 2, nnx.state(module, nnx.Param)))
    else:
        from mlx.utils import tree_map

        module.update(tree_map(lambda x: x * 2, module.parameters()))


FOLLOWED = {"torch": torch_module, "jax": nnx_module, "mlx": mlx_module}


def followed(engine: str, precision: str) -> tuple[Any, Any]:
    """A module, and that module compiled; PyTorch's compiler would take too long."""
    module, optimize = FOLLOWED[engine](), "none" if engine == "torch" else "default"
    return module, compiled_on_cpu(module, optimize=optimize, precision=precision)


@pytest.mark.parametrize("engine", FOLLOWED)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
def test_later_changes_of_weights_are_seen(engine: str, precision: str) -> None:
    module, compiled = followed(engine, precision)
    before = anydevice.to_numpy(detached(compiled(X))).astype(np.float64)
    made = compiled.report.made
    doubled(module, engine)
    after = anydevice.to_numpy(detached(compiled(X))).astype(np.float64)
    assert np.abs(after - before).max() > 0.5
    want = plainly(module, engine)
    np.testing.assert_allclose(after, want, atol=0.05 * np.abs(want).max())
    assert compiled.report.made == made, "other weights need no other code"
    assert compiled.verify(X).checked is not None
    doubled(module, engine)
    assert compiled.report.checked is None, "other weights were not checked"
    compiled(X)
    assert compiled.report.checked is None
    assert compiled.verify(X).checked is not None


@pytest.mark.parametrize("engine", FOLLOWED)
def test_later_changes_of_parts_are_seen(engine: str) -> None:
    module, compiled = followed(engine, "bfloat16")
    compiled(X)
    if engine == "torch":
        module[2] = pytest.importorskip("torch").nn.Linear(16, 7)
    elif engine == "jax":
        nnx = pytest.importorskip("flax.nnx")
        module.last = nnx.Linear(32, 7, rngs=nnx.Rngs(1))
    else:
        module.layers[3] = pytest.importorskip("mlx.nn").Linear(8, 7)
    assert tuple(compiled(X).shape) == (5, 7)
    assert len(compiled.report.made) == 1
    assert {len(x) for x in compiled.parameters.values() if np.ndim(x) == 1} >= {7}


def test_what_a_module_writes_is_its_own_where_its_output_stays() -> None:
    """A copy in another precision counts by itself; the module that was given does not."""
    copied = compiled_on_cpu(counting("nothing of it"), precision="bfloat16")
    copied(X)
    assert copied.verify(X).checked is not None
    module = counting("nothing of it")
    compiled = compiled_on_cpu(module, verify=X)
    compiled(X)
    assert compiled.report.checked is not None
    doubled(module, "torch")
    assert compiled.report.checked is None
    assert compiled.verify(X).checked is not None
    module.train()
    assert compiled.report.checked is None


def counting(kind: str) -> Any:
    """A module that counts its calls, and whose output depends on this kind of count."""
    torch = pytest.importorskip("torch")

    class Counting(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(16, 4)
            self.register_buffer("calls", torch.zeros(()))
            self.count = 0
            self.list: list[int] = []

        def forward(self, x: Any) -> Any:
            self.count += kind == "attribute"
            if kind == "list":
                self.list.append(1)
            elif kind == "new buffer":
                self.calls = self.calls + 1
            elif kind in ("buffer", "nothing of it"):
                self.calls += 1
            shown = 0 if kind == "nothing of it" else self.calls
            return self.inner(x) * (1 + shown + self.count + len(self.list))

    return Counting().eval()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("buffer", "calls"), ("new buffer", "calls"), ("attribute", "count"), ("list", None)],
)
def test_a_module_that_changes_itself(kind: str, name: str | None, precision: str) -> None:
    compiled = compiled_on_cpu(counting(kind), precision=precision)
    why = f": the model changes its {name} in each call" if name else ""
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"the output differs from run to run{why},"):
            compiled.verify(X)
        compiled(X)
    assert compiled.report.checked is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("made", ["script", "trace"])
def test_torchscript_is_verified_as_a_whole(torch: Any, made: str) -> None:
    layers = torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
    module = torch.nn.Sequential(*layers).eval()
    x = torch.from_numpy(X)
    scripted = torch.jit.script(module) if made == "script" else torch.jit.trace(module, x)
    for precision in ("float32", "float16"):
        checked = verified(scripted, optimize="none", precision=precision)
        assert (checked.parts, checked.weights) == (0, 7)
        assert checked.reference == "float64 on the CPU"
    assert_close(detached(scripted(x)), detached(module(x)), terms=2 * X.shape[1])
    if made == "script":
        with pytest.raises(ConfigurationError, match="1 is in training mode"):
            anydevice.compile(torch.jit.script(module.train()), "cpu", verify=X)


def test_a_copy_follows_the_mode_and_takes_what_inference_mode_made(torch: Any) -> None:
    with torch.inference_mode():
        module = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Dropout(0.5)).eval()
    compiled = compiled_on_cpu(module, precision="float16")
    assert_same_bits(compiled(X), compiled(X), because="one module without dropout ran twice")
    module.train()
    assert (compiled(X) != compiled(X)).any()


def test_a_wrong_part_of_a_pytorch_module_is_named(torch: Any) -> None:

    class Wrong(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x if x.dtype == torch.float64 else x * 1.001

    module = torch.nn.Sequential(torch.nn.Linear(16, 8), Wrong(), torch.nn.Linear(8, 2)).eval()
    with pytest.raises(VerificationError) as caught:
        compiled_on_cpu(module, verify=X)
    assert caught.value.where == "1 Wrong"


def test_nan_in_a_module_is_named(brought: tuple[str, str, Any, int]) -> None:
    _, engine, module, _ = brought
    here = anydevice.device("cpu", engine=engine)
    compiled = compiled_on_cpu(module)
    path = [name for name in compiled.parameters if np.ndim(compiled.parameters[name])][-1]
    weights: Any = anydevice.to_numpy(detached(compiled.parameters[path])).copy()
    weights[...] = np.nan
    spoiled = here(weights)
    if engine == "torch":
        module.load_state_dict({**module.state_dict(), path: spoiled})
    else:
        arguments = compiled._adapter.arguments
        _put(arguments, list(compiled.parameters).index(path), spoiled)
    with pytest.raises(VerificationError) as caught:
        compiled.verify(X)
    # PyTorch's module is its own source: there, the part that gives it is found.
    assert caught.value.where == ("1 Block" if engine == "torch" else path)


def _put(arguments: Any, place: int, value: Any) -> None:
    """Replace one weight on the device, wherever in the nest it is."""
    if isinstance(arguments, list) and not isinstance(arguments[0], dict):
        arguments[place] = value
    else:
        arguments["layers"][3]["bias"] = value


def test_several_inputs_by_name(torch: Any) -> None:

    class Masked(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(16, 4)

        def forward(self, x: Any, mask: Any = None, scale: float = 1.0) -> Any:
            y = self.inner(x) * scale
            return {"y": y if mask is None else y * mask, "masked": mask is not None}

    compiled = anydevice.compile(Masked().eval(), "cpu", optimize="none")
    mask = np.zeros((5, 1), np.float32)
    assert compiled(X, mask=mask, scale=2.0)["y"].abs().sum() == 0
    assert compiled(X)["masked"] is False
    assert len(compiled.report.made) == 2
    checked = compiled.verify({"x": X, "mask": mask, "scale": 2.0}).checked
    assert checked is not None
    assert checked.parts == 1


def test_linen_is_told_what_to_do() -> None:
    linen = pytest.importorskip("flax.linen")
    with pytest.raises(ConfigurationError, match=r"lambda x: module\.apply\(variables, x\)"):
        anydevice.compile(linen.Dense(3), "cpu")


def test_keys_of_random_numbers_are_no_weights_and_changes_are_not_kept() -> None:
    module = nnx_module()
    assert "are not kept" in anydevice.compile(module, "cpu").report.notes[0]
    names = list(adapter_of(module).weights())
    assert not any("key" in name for name in names)
    assert any("kernel" in name for name in names)


def test_parts_that_are_only_traced_are_left_out(jax: Any, eqx: Any) -> None:
    """Inside `vmap` there are no numbers to compare; the output is compared all the same."""

    class Batched(eqx.Module):  # type: ignore[misc]
        inner: Any

        def __call__(self, x: Any) -> Any:
            return jax.vmap(self.inner)(x)

    module = Batched(eqx.nn.Linear(16, 4, key=jax.random.key(0)))
    assert isinstance(adapter_of(module), EquinoxAdapter)
    checked = verified(module)
    assert (checked.parts, checked.weights) == (0, 2)


def test_a_module_goes_where_it_is_sent() -> None:
    module = torch_module()
    compiled = anydevice.compile(module, Device("cpu", engine="jax"), optimize="none")
    assert compiled.device.engine == "torch"
    assert compiled.report.notes == (
        "jax was asked for, and a torch.nn.Module runs in torch: it stays there",
    )
    for free in ("cpu", Device("cpu"), Device("cpu", engine="torch")):
        assert anydevice.compile(module, free, optimize="none").report.notes == ()


def test_without_a_device_a_module_goes_where_things_go(jax: Any) -> None:
    with anydevice.use_device("cpu"), jax.default_device(jax.devices("cpu")[0]):
        compiled = anydevice.compile(torch_module(), optimize="none", verify=X)
        assert (str(compiled.device), compiled.device.engine) == ("cpu", "torch")
        for make in (nnx_module, equinox_module, mlx_module):
            assert str(anydevice.compile(make(), optimize="none").device) == "cpu"


def test_counts_among_the_weights_stay_counts(torch: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4)).eval()
    compiled = compiled_on_cpu(module, precision="bfloat16", verify=X)
    assert compiled.parameters["1.num_batches_tracked"].dtype == torch.int64
    assert compiled.parameters["1.running_mean"].dtype == torch.bfloat16


def test_a_class_that_inherits_its_call_gets_it_back() -> None:
    layers = pytest.importorskip("mlx.nn")

    class Mine(layers.Linear):  # type: ignore[misc]
        pass

    module = layers.Sequential(Mine(16, 4))
    before = layers.Linear.__call__
    assert verified(module, optimize="none").parts == 1
    assert "__call__" not in vars(Mine)
    assert layers.Linear.__call__ is before


def test_weights_without_axes_are_verified(torch: Any) -> None:

    class Scaled(torch.nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.scale.exp()

    assert verified(Scaled().eval(), optimize="none").weights == 3


def test_an_example_by_name_is_verified(brought: tuple[str, str, Any, int]) -> None:
    _, engine, module, parts = brought
    example = {"input" if engine == "torch" else "x": X}
    assert verified(module, example, optimize="none").parts == parts
