"""Claims are attached to models, saved with them, and checked again for the weights as compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, proofs
from anydevice._compile.properties import check_claims
from anydevice._core.trees import mapped
from anydevice._formats import model as files
from anydevice._libraries.native import NativeAdapter
from anydevice._libraries.precision import policy_of
from anydevice._nn.saving import to_json
from anydevice.errors import ConfigurationError, TransferError, VerificationError

CPU = anydevice.device("cpu", engine="numpy")
UNIT = proofs.box(-1.0, 1.0)
SHARE = proofs.within(0, 1)


def small(seed: int = 0) -> nn.Model:
    return nn.build(nn.Dense(2, 6), "relu", nn.Dense(6, 2), "sigmoid", seed=seed, device=CPU)


def proved(model: Any, claim: Any = SHARE, region: Any = UNIT, **options: Any) -> proofs.Claim:
    result = proofs.prove(model, claim, region, limit=60, **options)
    assert isinstance(result, proofs.Proof), result
    return proofs.claim(claim, region, proof=result)


def test_a_claim_is_checked_for_the_weights_that_it_was_proved_of() -> None:
    model = small()
    claim = proved(model)
    assert claim.check(model) >= 1
    changed = model.with_parameters(mapped(lambda x: x * np.float32(1.0001), model.parameters))
    with pytest.raises(VerificationError, match="another network"):
        claim.check(changed)
    exact = proved(model, precision="real").certificates
    for share, region, certificates, message in (
        (SHARE, proofs.box(-2.0, 2.0), claim.certificates, "other queries"),
        (proofs.within(0.1, 0.9), UNIT, claim.certificates, "other queries"),
        (SHARE, UNIT, exact, "real arithmetic"),
        (SHARE, UNIT, (claim.certificates[0][:-4],), "does not hold"),
    ):
        with pytest.raises(VerificationError, match=message):
            proofs.Claim(share, region, "float32", certificates).check(model)
    with pytest.raises(ConfigurationError, match="no certificate"):
        proofs.claim(SHARE, UNIT).check(model)


def test_claims_are_saved_with_the_model(tmp_path: Path) -> None:
    model = small()
    claims = (proved(model), proofs.claim(proofs.finite(), UNIT, precision="real"))
    path = tmp_path / "model.safetensors"
    nn.save(model.with_properties(*claims), path)
    again = nn.load(path, CPU)
    assert again.properties == claims
    assert again.properties[0].check(again) >= 1
    assert nn.load(path, CPU).freeze().properties == claims


def test_saving_says_once_which_claims_are_not_proved(tmp_path: Path, capsys: Any) -> None:
    model, path = small(), tmp_path / "model.safetensors"
    stated = proofs.claim(proofs.within(-3, 3), UNIT), proofs.claim(proofs.finite(), UNIT)
    for _ in range(3):
        nn.save(model.with_properties(proved(model), *stated), path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"{path} has 2 claims without a proof: claim.proved(model) proves one, and its certificate "
        "is saved with it"
    )
    nn.save(model.with_properties(*[claim.proved(model) for claim in stated]), path)
    nn.save(model, path)
    assert not capsys.readouterr().err
    nn.save(model.with_properties(*stated), tmp_path / "other.safetensors")
    assert "other.safetensors has 2 claims" in capsys.readouterr().err


def test_the_report_of_compile_says_which_claims_are_not_proved() -> None:
    share, finite = proofs.claim(SHARE, UNIT), proofs.claim(proofs.finite(), UNIT)
    model = small().with_properties(share, finite)
    tells = "compile with properties=model.properties, or with verify=True in compat.axiom"
    assert f"claims     2 unproved claims; {tells}" in str(anydevice.compile(model, CPU).report)
    some = anydevice.compile(model, CPU, properties=[proofs.claim(SHARE, UNIT)]).report
    assert some.unproved == (str(finite),)
    assert f"1 unproved claim; {tells}" in str(some)
    every = anydevice.compile(model, CPU, properties=model.properties).report
    assert (len(every.proved), every.unproved) == (2, ())
    assert "unproved" not in str(every)


def test_claims_stay_where_a_model_is_moved_and_trained() -> None:
    torch = pytest.importorskip("torch")
    claim = proofs.claim(SHARE, UNIT)
    model = small().with_properties(claim)
    there = anydevice.to_device(model, anydevice.device("cpu", engine="torch"), convert=True)
    assert there.properties == (claim,)
    x = np.zeros((8, 2), np.float32)
    data = nn.Batches(x, x, 4)
    done = nn.train(
        there, data, nn.Adam(0.01), "mean_squared_error", epochs=1, optimize="none", progress=False
    )
    assert done.model.properties == (claim,)
    del torch


def test_a_function_cannot_be_saved(tmp_path: Path) -> None:
    def is_small(y: Any) -> bool:
        return True

    model = small().with_properties(is_small)
    with pytest.raises(ConfigurationError, match="is_small, a Python function, cannot be saved"):
        nn.save(model, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_damaged_claims_in_a_file_are_refused(tmp_path: Path) -> None:
    model = small()
    path = tmp_path / "model.safetensors"
    damaged: list[Any] = [[{}], [{"property": 1}], [3], "x"]
    for bad in damaged:
        said = {"layer": to_json(model.layer), "input_shape": [2], "properties": bad}
        files.write(path, "model", {"parameters": model.parameters}, said)
        with pytest.raises(TransferError, match="its properties are damaged"):
            nn.load(path, CPU)


@pytest.mark.parametrize(
    "made",
    [
        lambda: small().with_properties(proofs.within(0, 1)),
        lambda: small().with_properties(3),
        lambda: proofs.claim(proofs.within(0, 1), (0, 1)),  # type: ignore[arg-type]
        lambda: proofs.claim(lambda y: True, UNIT),  # type: ignore[arg-type]
        lambda: proofs.claim(SHARE, UNIT, precision="float16"),
        lambda: proofs.claim(SHARE, UNIT, proof=3),  # type: ignore[arg-type]
        lambda: anydevice.compile(small(), CPU, properties=[SHARE]),  # type: ignore[list-item]
        lambda: anydevice.compile(small(), CPU, properties=[lambda y: True]),
    ],
)
def test_what_is_no_claim_is_refused(made: Any) -> None:
    with pytest.raises(ConfigurationError):
        made()


def test_compile_checks_certificates_for_the_weights_as_compiled() -> None:
    model = small()
    claim = proved(model)
    fast = anydevice.compile(model, CPU, properties=[claim])
    (line,) = fast.report.proved
    assert "for every float32 execution" in line
    assert "proved     Within" in str(fast.report)
    with pytest.raises(VerificationError, match="another network"):
        anydevice.compile(small(1), CPU, properties=[claim])
    exact = anydevice.compile(model, CPU, properties=[proved(model, precision="real")])
    assert "roundings of float32 are not covered" in exact.report.proved[0]
    # Functions beside it are checked on the example.
    x = np.zeros((3, 2), np.float32)
    both = anydevice.compile(model, CPU, verify=x, properties=[claim, lambda y: (y > 0).all()])
    assert len(both.report.proved) == 1
    assert both.report.checked is not None
    assert both.report.checked.properties == ("<lambda>",)


def test_compile_proves_what_has_no_certificate_and_refuses_what_is_false() -> None:
    model = small()
    fast = anydevice.compile(model, CPU, properties=[proofs.claim(SHARE, UNIT)])
    assert "checked again" in fast.report.proved[0]
    with pytest.raises(VerificationError, match="does not hold: not for x = "):
        anydevice.compile(model, CPU, properties=[proofs.claim(proofs.within(0.5, 1), UNIT)])


@pytest.mark.parametrize("precision", ["bfloat16", "mixed"])
def test_16_bits_are_not_covered(precision: str) -> None:
    pytest.importorskip("torch")
    model = small()
    where = anydevice.device("cpu", engine="torch")
    claim = proved(model)
    fast = anydevice.compile(model, where, precision=precision, optimize="none", properties=[claim])
    assert "not covered: it computes in bfloat16" in fast.report.proved[0]


def test_convolutions_of_accelerators_are_not_covered() -> None:
    model = nn.build(
        nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Dense(4, 1), input_shape=(1, 3), device=CPU
    )
    claim = proofs.claim(proofs.finite(), UNIT)
    adapter, policy = NativeAdapter(model), policy_of("float32", CPU)
    (there,) = check_claims(adapter, anydevice.Device("cuda", 0, engine="cupy"), policy, [claim])
    assert "not covered: accelerators may compute convolutions by other sums" in there
    (here,) = check_claims(adapter, CPU, policy, [claim])
    assert "for every float32 execution" in here


def test_compiled_modules_of_pytorch_are_checked_until_they_change() -> None:
    torch: Any = pytest.importorskip("torch")
    nn_ = torch.nn
    torch.manual_seed(0)
    module = nn_.Sequential(nn_.Linear(2, 6), nn_.ReLU(), nn_.Linear(6, 1), nn_.Sigmoid())
    region = proofs.box([-1.0, -1.0], [1.0, 1.0])
    claim = proved(module, region=region)
    fast = anydevice.compile(module, "cpu", optimize="none", properties=[claim])
    assert "for every float32 execution" in fast.report.proved[0]
    with torch.no_grad():
        module[0].weight += 1e-3
    assert fast.report.proved == (
        "nothing: the model was changed after its properties were proved",
    )
    with pytest.raises(VerificationError, match="another network"):
        anydevice.compile(module, "cpu", optimize="none", properties=[claim])


def test_orders_are_proved_of_logits_and_slopes_of_derivatives() -> None:
    model = nn.build(nn.Dense(2, 3), "relu", nn.Dense(3, 2), "softmax", device=CPU)
    weights: Any = mapped(np.copy, model.parameters)
    weights[0]["weight"][:] = [[1, 0], [0, 1], [1, 1]]
    weights[2]["weight"][:] = [[1, 0, 1], [-1, 0, 0]]
    weights[2]["bias"][:] = [1, 0]
    model = model.with_parameters(weights)
    region = proofs.box(0.0, 1.0)
    claim = proved(model, proofs.all_of(proofs.same_class(0), proofs.less(1, 0)), region)
    assert claim.check(model) >= 1
    plain = model.with_layer(nn.Chain(*model.layer.layers[:3], "identity"))  # type: ignore[attr-defined]
    rising = proved(plain, proofs.all_of(proofs.monotone(0), proofs.lipschitz(3.5)), region)
    assert rising.check(plain) >= 2
    assert len(rising.certificates) == 2
    falling = proofs.prove(plain, proofs.monotone(0, rising=False), region, limit=120)
    assert isinstance(falling, proofs.Counterexample)
    steep = proofs.prove(plain, proofs.lipschitz(1.5), region, limit=120)
    assert isinstance(steep, proofs.Counterexample)
