"""Executes ONNX files, by onnxruntime or by the reference implementation of onnx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def open_onnxruntime(data: bytes) -> Callable[..., Any]:
    """Return a function from the names of outputs, and the inputs by name, to the outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run


def open_reference(data: bytes) -> Callable[..., Any]:
    """Return the same as `open_onnxruntime`, with onnx alone."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(onnx.load_model_from_string(data)).run
