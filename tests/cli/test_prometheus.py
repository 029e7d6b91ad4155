"""`anydevice watch --prometheus`: what its parser reads, and a server that starts and ends."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from anydevice._core.record import replace
from anydevice.cli.prometheus import exposition
from tests.cli.conftest import Anydevice
from tests.cli.test_watch import CPU, H200, SILENT

parser = pytest.importorskip("prometheus_client.parser")
COMMAND = [sys.executable, "-m", "anydevice", "watch", "--device", "cpu", "--prometheus"]


def parse(text: str) -> dict[str, Any]:
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def test_the_names_units_and_labels_of_dcgm() -> None:
    named = replace(H200, device="cuda:1", name='a "card"\n\\', uuid="GPU-1")
    families = parse(exposition([H200, named, CPU, SILENT]))
    dcgm = {
        "GPU_UTIL": 78, "MEM_COPY_UTIL": 41, "FB_USED": 71680, "FB_FREE": 71680,
        "FB_TOTAL": 144384, "GPU_TEMP": 62, "POWER_USAGE": 512.4, "POWER_MGMT_LIMIT": 700,
        "SM_CLOCK": 1980, "FAN_SPEED": 40,
    }  # fmt: skip
    values = {name: family.samples[0].value for name, family in families.items()}
    expected = {f"DCGM_FI_DEV_{name}": dcgm[name] for name in dcgm} | {"anydevice_cpu_load": 5}
    assert values.items() >= expected.items()
    _, second = families["DCGM_FI_DEV_GPU_UTIL"].samples  # not the CPU, and not a card that is mute
    labels = {"gpu": "1", "UUID": "GPU-1", "device": "cuda:1", "modelName": named.name}
    assert second.labels == {**labels, "Hostname": socket.gethostname()}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_asked_and_ended(ending: signal.Signals) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, ":0"], **pipes) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1].rstrip(";")
        port = int(url.split(":")[2].removesuffix("/metrics"))
        sockets = psutil.Process(process.pid).net_connections()
        assert [x.laddr for x in sockets if x.status == "LISTEN"] == [("127.0.0.1", port)]
        with socket.create_connection(("127.0.0.1", port)) as gone:  # and reset half-way
            gone.sendall(b"GET /met")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with urlopen(url, timeout=60) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert parse(answer.read().decode())["anydevice_cpu_total"].samples[0].value > 0
        taken = subprocess.run([*COMMAND, f":{port}"], capture_output=True, text=True, timeout=400)
        assert taken.returncode == 2
        assert f"cannot listen at :{port}: Address already in use; give another" in taken.stderr
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.sendall(b"GET /metrics HTTP/1.1\r\n")  # and no more of it
            process.send_signal(ending)
            assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_a_wrong_command_is_refused_and_once_is_for_a_file(anydevice: Anydevice) -> None:
    for text in ("nine", ":99999", "::1:9400", "[::1]", ":-1", "host:"):
        err = anydevice.refusal("watch", f"--prometheus={text}", cuda=0)
        assert f"{text!r} is not an address such as :9400" in err
    for words in (["--json"], ["--csv"], ["--interval", "1"]):
        assert anydevice("watch", "--prometheus", *words)[0] == 2
    shown = anydevice.text("watch", "--prometheus", "--once", cuda=2, memory="80GiB")
    assert len(parse(shown)["DCGM_FI_DEV_FB_TOTAL"].samples) == 2
