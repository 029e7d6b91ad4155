"""Every error has a code that the documentation lists, and carries its reasons."""

from __future__ import annotations

import pickle

import pytest

from anydevice import errors
from anydevice._core.engine import Absent
from anydevice._core.finding import Reason
from anydevice._report.diagnosis import CAUSES


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.AnyDeviceError("m"), "failed"),
        (errors.DeviceNotFoundError("m"), "no_such_device"),
        (errors.DeviceNotFoundError("m", (), [Reason("hidden", "t")]), "hidden"),
        (errors.DeviceMismatchError("m"), "device_mismatch"),
        (errors.UnsupportedError("m"), "unsupported"),
        (Absent("no", "yes", "no_autodiff").error(), "no_autodiff"),
        (errors.OutOfMemoryError("m"), "out_of_memory"),
        (errors.TransferError("m"), "transfer_failed"),
        (errors.VerificationError("m"), "wrong_answer"),
        (errors.ConfigurationError("m"), "bad_setting"),
    ],
)
def test_the_code_of_an_error(error: errors.AnyDeviceError, code: str) -> None:
    assert error.code == code
    assert code in CAUSES
    assert pickle.loads(pickle.dumps(error)).code == code


def test_what_is_absent_is_a_reason_with_a_fix() -> None:
    absent = Absent("OpenCL has no autodiff", "train on torch", "no_autodiff")
    assert absent.error().reasons == (
        Reason("no_autodiff", "OpenCL has no autodiff", "train on torch"),
    )
