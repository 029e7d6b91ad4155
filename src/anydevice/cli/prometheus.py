"""The metrics of `anydevice watch --prometheus`: text format 0.0.4, over HTTP.

GPUs and TPUs have the names and units of NVIDIA's dcgm-exporter, so that its dashboards and alerts
work for every vendor; the CPU has names of its own, since theirs are added up over all GPUs.
"""

from __future__ import annotations

import os
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from anydevice._core.locks import ForkSafeLock
from anydevice.cli.printing import Output, complain
from anydevice.cli.terminal import TerminalEvents
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice.cli.watch import DeviceUsage

DEFAULT = ":9400"
"""The port of dcgm-exporter, on loopback."""
_PATH = "/metrics"
_ADDRESS = re.compile(r"(?:([^:\[\]]*|\[[^\[\]]+\]):)?([0-9]{1,5})")
_MIB = 2**-20
_METRICS = (
    ("DCGM_FI_DEV_GPU_UTIL", "load", 100, "Share of the time in use (in %)."),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "memory_load", 100, "Share of memory traffic (in %)."),
    ("DCGM_FI_DEV_FB_USED", "used", _MIB, "Memory in use (in MiB)."),
    ("DCGM_FI_DEV_FB_FREE", "free", _MIB, "Free memory (in MiB)."),
    ("DCGM_FI_DEV_FB_TOTAL", "total", _MIB, "All memory (in MiB)."),
    ("DCGM_FI_DEV_GPU_TEMP", "temperature", 1, "Temperature (in C)."),
    ("DCGM_FI_DEV_POWER_USAGE", "power", 1, "Power draw (in W)."),
    ("DCGM_FI_DEV_POWER_MGMT_LIMIT", "power_limit", 1, "Power limit (in W)."),
    ("DCGM_FI_DEV_SM_CLOCK", "clock", 1, "Clock (in MHz)."),
    ("DCGM_FI_DEV_FAN_SPEED", "fan", 100, "Share of the fan's full speed (in %)."),
)
"""The name of a metric, the reading, its factor, and the help."""


def exposition(usages: Sequence[DeviceUsage]) -> str:
    """Return the metrics in Prometheus' text format; what is unknown has no sample."""
    lines: list[str] = []
    rows = [(usage.device.startswith("cpu"), _labels(usage), usage.to_dict()) for usage in usages]
    for name, key, factor, text in _METRICS:
        for metric, is_cpu in ((name, False), (f"anydevice_cpu_{key}", True)):
            values = [(labels, plain[key]) for cpu, labels, plain in rows if cpu == is_cpu]
            known = [(labels, value) for labels, value in values if isinstance(value, int | float)]
            lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge"] if known else []
            lines += [f"{metric}{{{labels}}} {value * factor:.10g}" for labels, value in known]
    return "".join(f"{line}\n" for line in lines)


def _labels(usage: DeviceUsage) -> str:
    labels = {
        "gpu": usage.device.partition(":")[2] or "0",
        "UUID": usage.uuid or "",
        "device": usage.device,
        "modelName": usage.name,
        "Hostname": socket.gethostname(),
    }
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())


def serve(address: str, measure: Callable[[], Sequence[DeviceUsage]], output: Output) -> None:
    """Answer requests for the metrics until Ctrl-C or a signal to end.

    Raises `ConfigurationError` for an address that is none or cannot be listened at.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) >= 2**16:
        raise ConfigurationError(
            f"--prometheus: {address!r} is not an address such as :9400, 0.0.0.0:9400 or [::]:9400",
            "--prometheus",
        )
    host, port = (match[1] or "127.0.0.1").strip("[]"), int(match[2])
    _Server.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = _Server((host, port), _Handler)
    except OSError as error:
        raise ConfigurationError(
            f"--prometheus: cannot listen at {address}: {error.strerror or error}; give another "
            "address or port, such as --prometheus :9401",
            "--prometheus",
        ) from error
    server.measure = measure
    with server, TerminalEvents() as events:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"{match[1] or host}:{server.server_address[1]}"
        output.write(f"Serving http://{place}{_PATH}; Ctrl-C ends\n")
        while events.wait_until(time.monotonic() + 3600) != "quit":
            pass
        server.shutdown()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = os.name == "posix"  # elsewhere two programs could share the port
    daemon_threads = True
    lock = ForkSafeLock()
    measure: Callable[[], Sequence[DeviceUsage]]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error in one line; a client that leaves is none."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            complain(f"{client_address[0]} got no metrics: {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0  # seconds that a client may take to send its request
    server_version, sys_version = "anydevice", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != _PATH:
            self.send_error(404, explain=f"the metrics are at {_PATH}")
            return
        with self.server.lock.native:  # one look at the devices at a time
            body = exposition(self.server.measure()).encode("utf-8", "replace")
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:  # noqa: A002 - the name there
        """Print nothing for a request."""
