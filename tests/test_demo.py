"""The command line: `python -m rstream demo` and `info`."""

import os
import random
import re
import subprocess
import sys
import zlib

import pytest

from rstream import _demo


@pytest.fixture(scope="module")
def device_name():
    return "0" if os.environ.get("RSTREAM_TEST_DEVICE", "soft") == "gpu" else "soft"


@pytest.fixture(scope="module")
def rstream(device_name):
    def call(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "rstream", *map(str, arguments)],
            env=os.environ | {"RSTREAM_DEVICE": device_name} | environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return call


@pytest.mark.parametrize("size", [1, 4096, 100_000, 131_072])
def test_the_checksum_by_way_of_the_device_is_zlibs(rstream, tmp_path, size):
    file = tmp_path / "data"
    content = random.Random(size).randbytes(size)
    file.write_bytes(content)
    done = rstream("demo", file, "--chunk", 4096, "--streams", 3)
    assert (done.returncode, done.stderr) == (0, "")
    chunks = -(-size // 4096)
    assert f"bytes       {size:,} in {chunks} chunks" in done.stdout
    assert f"callbacks   {chunks + 1000:,} accepted, {chunks + 1000:,} run, 0 failed" in done.stdout
    assert f"crc-32      {zlib.crc32(content):08x}, the same" in done.stdout
    assert re.search(r"^throughput +[\d.,]+ MB/s", done.stdout, re.MULTILINE)
    assert re.search(r"^latency +p50 [\d.]+ us, p99 [\d.]+ us", done.stdout, re.MULTILINE)


def test_without_a_file_it_takes_one_that_comes_with_python(rstream):
    done = rstream("demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert os.path.getsize(_demo.default_file()) > 1_000_000
    assert f"bytes       {os.path.getsize(_demo.default_file()):,} in" in done.stdout


def test_an_empty_file(rstream, tmp_path):
    file = tmp_path / "empty"
    file.touch()
    done = rstream("demo", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bytes       0 in 0 chunks" in done.stdout
    assert "crc-32      00000000, the same" in done.stdout


@pytest.mark.parametrize("name", ["missing", ".", "loop"])
def test_a_file_that_cannot_be_read_is_one_line_and_status_2(rstream, tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    done = rstream("demo", tmp_path / name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"rstream demo: cannot read {tmp_path / name}: ")
    assert done.stderr.count("\n") == 1


def test_a_pipe_is_refused_at_once(rstream, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = rstream("demo", pipe)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"rstream demo: cannot read {pipe}: it is not a regular file\n"


@pytest.mark.parametrize("device", ["soft:99", "nonsense"])
def test_a_device_that_is_not_there_is_one_line_and_status_2(rstream, device):
    done = rstream("demo", "--device", device)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rstream demo: cannot use the device: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--chunk", "0"], ["--streams", "-1"], ["--streams", "x"]])
def test_a_wrong_argument_is_status_2(rstream, arguments):
    done = rstream("demo", *arguments)
    assert done.returncode == 2
    assert "is not a number of at least 1" in done.stderr


def test_it_says_which_device_and_why(rstream, tmp_path, device_name):
    file = tmp_path / "data"
    file.write_bytes(b"data")
    assert f"RSTREAM_DEVICE={device_name}" in rstream("demo", file).stdout
    chosen = rstream("demo", file, "--device", "soft:1").stdout
    assert re.match(r"device +soft:1, .*--device", chosen)
    unasked = rstream("demo", file, RSTREAM_DEVICE="").stdout
    assert re.match(r"device +(0, .*the first GPU|soft:0, .*since there is no GPU: )", unasked)


def test_a_mismatch_is_status_1(monkeypatch, tmp_path, capsys, device_name):
    file = tmp_path / "data"
    file.write_bytes(b"data")
    monkeypatch.setattr(_demo, "_independent", lambda path: 0)
    assert _demo.run(str(file), device=device_name, streams=1, chunk=4) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        f"rstream demo: CRC-32 {zlib.crc32(b'data'):08x} by way of the device, 00000000 by zlib: they differ\n"
    )


@pytest.mark.parametrize("first", [b"", b"a", b"stream" * 1000])
@pytest.mark.parametrize("second", [b"", b"\0", b"callback" * 999])
def test_crcs_combine_as_zlibs_do(first, second):
    combined = _demo.crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


def test_info_lists_the_devices(rstream):
    done = rstream("info")
    assert (done.returncode, done.stderr) == (0, "")
    assert "device soft:0: " in done.stdout
    assert re.search(r"driver +CUDA \d+\.\d", done.stdout)
    assert re.search(r"managed memory +(yes|no)$", done.stdout, re.MULTILINE)


def test_who_reads_the_output_may_have_seen_enough():
    reads, writes = os.pipe()
    os.close(reads)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "rstream", "info"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, timeout=60, env=environment)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, b"")


def test_no_command_is_status_2(rstream):
    done = rstream()
    assert done.returncode == 2
    assert "info" in done.stderr
