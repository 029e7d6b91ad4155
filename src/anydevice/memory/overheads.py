"""What a process takes of a device beside its tensors: the driver's context and kept workspaces.

Measured on an NVIDIA H200 with PyTorch; other devices take less. An estimate that is to say
whether a model fits errs on this side.
"""

from __future__ import annotations

CONTEXT = 560 * 2**20
"""Bytes that a process with a CUDA context and the usual kernels takes before its first tensor."""

WORKSPACE = 32 * 2**20
"""Bytes that the library for matrix products keeps; PyTorch counts them among its allocations."""
