"""`anydevice watch --prometheus`: what its parser reads, and a server that starts and ends."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from anydevice._core.record import replace
from anydevice.cli.prometheus import exposition
from tests.cli.conftest import Anydevice
from tests.cli.test_watch import CPU, H200, SILENT

Parser = Any
Served = tuple[subprocess.Popen[str], str]
COMMAND = [sys.executable, "-m", "anydevice", "watch", "--device", "cpu", "--prometheus"]


@pytest.fixture
def parse() -> Parser:
    parser = pytest.importorskip("prometheus_client.parser")
    return lambda text: {each.name: each for each in parser.text_string_to_metric_families(text)}


@pytest.fixture
def served() -> Iterator[Served]:
    """The server on a free port, and the URL that it says."""
    with subprocess.Popen(
        [*COMMAND, ":0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[1].rstrip(";")
        process.kill()


def fetch(url: str) -> tuple[str, str]:
    with urlopen(url, timeout=60) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_the_names_units_and_labels_of_dcgm(parse: Parser) -> None:
    named = replace(H200, device="cuda:1", name='a "card"\n\\', uuid="GPU-1")
    families = parse(exposition([H200, named, CPU, SILENT]))
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values.pop("anydevice_cpu_load") == 5
    assert {name: value for name, value in values.items() if name.startswith("DCGM")} == {
        "DCGM_FI_DEV_GPU_UTIL": 78, "DCGM_FI_DEV_MEM_COPY_UTIL": 41, "DCGM_FI_DEV_FAN_SPEED": 40,
        "DCGM_FI_DEV_FB_USED": 70 * 1024, "DCGM_FI_DEV_FB_FREE": 70 * 1024,
        "DCGM_FI_DEV_FB_TOTAL": 141 * 1024, "DCGM_FI_DEV_GPU_TEMP": 62,
        "DCGM_FI_DEV_POWER_USAGE": 512.4, "DCGM_FI_DEV_POWER_MGMT_LIMIT": 700,
        "DCGM_FI_DEV_SM_CLOCK": 1980,
    }  # fmt: skip
    assert {family.type for family in families.values()} == {"gauge"}
    _, second = families["DCGM_FI_DEV_GPU_UTIL"].samples  # not the CPU, and not a card that is mute
    host = socket.gethostname()
    labels = {"gpu": "1", "UUID": "GPU-1", "device": "cuda:1", "modelName": 'a "card"\n\\'}
    assert second.labels == {**labels, "Hostname": host}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_asked_left_and_ended(
    ending: signal.Signals, served: Served, parse: Parser
) -> None:
    process, url = served
    kind, text = fetch(url)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert parse(text)["anydevice_cpu_total"].samples
    port = int(url.split(":")[2].split("/")[0])
    listening = [c for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"]
    assert [tuple(each.laddr) for each in listening] == [("127.0.0.1", port)]
    with closing(socket.create_connection(("127.0.0.1", port))) as gone:
        gone.sendall(b"GET /met")
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with pytest.raises(HTTPError, match="404"):
        fetch(url.replace("/metrics", "/"))
    assert parse(fetch(url)[1])
    taken = subprocess.run([*COMMAND, f":{port}"], capture_output=True, text=True, timeout=400)
    assert (taken.returncode, taken.stdout) == (2, "")
    assert f"cannot listen at :{port}: Address already in use; give another" in taken.stderr
    with closing(socket.create_connection(("127.0.0.1", port))) as waiting:
        waiting.sendall(b"GET /metrics HTTP/1.1\r\n")  # and no more of it
        time.sleep(0.2)
        process.send_signal(ending)
        assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


@pytest.mark.parametrize("address", ["nine", ":99999", "::1:9400", "[::1]", ":-1", "host:"])
def test_an_address_that_is_none(anydevice: Anydevice, address: str) -> None:
    err = anydevice.refusal("watch", f"--prometheus={address}", cuda=0)
    assert f"{address!r} is not an address such as :9400" in err


def test_once_is_for_a_file(anydevice: Anydevice, parse: Parser) -> None:
    shown = anydevice.text("watch", "--prometheus", "--once", cuda=2, memory="80GiB")
    assert len(parse(shown)["DCGM_FI_DEV_FB_TOTAL"].samples) == 2
    for words in (["--json"], ["--csv"], ["--interval", "1"]):
        assert anydevice("watch", "--prometheus", *words)[0] == 2
