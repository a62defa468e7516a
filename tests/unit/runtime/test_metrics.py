"""metrics.jsonl: exact, strict, whole lines, cut back at resume, patient with a full disk."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forked import run_forked

from gptlab.config.errors import UserError
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.records.metrics import AppendFile, MetricsLog, blocks_of_lines, read_metrics


def test_one_line_by_hand(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write("train", step=1, loss=0.1, mfu=None)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"kind": "train", "step": 1, "loss": 0.1, "mfu": null}\n'


def test_floats_read_back_bit_for_bit(tmp_path: Path) -> None:
    generator = random.Random(0)
    bits = [generator.getrandbits(64) for _ in range(5000)] + [0, 1, 1 << 63, 0x000F_FFFF_FFFF_FFFF]
    values = [struct.unpack("<d", struct.pack("<Q", b))[0] for b in bits]
    values = [value for value in values if math.isfinite(value)]
    with MetricsLog(tmp_path / "m") as log:
        log.write("train", values=values)
    read = read_metrics(tmp_path / "m")[0]["values"]
    assert isinstance(read, list)
    assert [struct.pack("<d", v) for v in read] == [struct.pack("<d", v) for v in values]


def test_json_is_strict_and_non_finite_floats_read_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m") as log:
        log.write("event", a=float("nan"), b=[float("inf"), {"c": (-float("inf"), 1.5)}], d="nan")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((tmp_path / "m").read_text(), parse_constant=refuse)
    assert record == {"kind": "event", "a": "nan", "b": ["inf", {"c": ["-inf", 1.5]}], "d": "nan"}
    assert math.isnan(float(record["a"]))
    assert float(record["b"][1]["c"][0]) == -math.inf


def test_a_value_that_is_no_number_is_an_error_of_the_program() -> None:
    with pytest.raises(TypeError):
        to_json({"loss": object()})


def test_any_text_stays_on_one_line(tmp_path: Path) -> None:
    text = "line\nbreaks\r\n\u2028 \u0085 and \ud800 half a pair \x00"
    with MetricsLog(tmp_path / "m") as log:
        log.write("sample", text=text)
        log.write("event")
    assert (tmp_path / "m").read_bytes().count(b"\n") == 2
    assert read_metrics(tmp_path / "m")[0]["text"] == text


def test_cut_at_resume_equals_a_run_that_never_stopped(tmp_path: Path) -> None:
    def train(log: MetricsLog, steps: range) -> None:
        for step in steps:
            log.write("train", step=step, loss=1 / (step + 1))

    with MetricsLog(tmp_path / "whole") as log:
        train(log, range(10))
    with MetricsLog(tmp_path / "killed") as log:
        train(log, range(6))
        offset = log.position()
        train(log, range(6, 9))
    with (tmp_path / "killed").open("ab") as file:
        file.write(b'{"kind": "train", "step": 9, "lo')  # torn by the kill
    with MetricsLog(tmp_path / "killed") as log:
        assert log.truncate(offset)
        train(log, range(6, 10))
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_resume_from_a_checkpoint_before_the_first_line(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m") as log:
        offset = log.position()
        log.write("train", step=0)
        assert log.truncate(offset)
        log.write("eval", step=0)
    assert [r["kind"] for r in read_metrics(tmp_path / "m")] == ["eval"]


@pytest.mark.parametrize("torn", [b"{", b'{"kind": "tr', b'{"kind": "train", "step": 1}', b"x" * 200_000])
def test_a_torn_last_line_never_grows_into_the_next(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"kind": "train", "step": 0}\n' + torn)
    if not torn.endswith(b"}"):
        assert [r["step"] for r in read_metrics(path)] == [0]
    with MetricsLog(path) as log:
        log.write("train", step=7)
    assert [r["step"] for r in read_metrics(path)] == [0, 7]


def test_a_file_that_is_not_the_one_is_told(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m") as log:
        log.write("train", step=0)
        length = log.position()
        log.write("train", step=1)
        assert not log.truncate(length + 1)  # inside a line
        assert log.position() == length
        assert not log.truncate(10**6)  # beyond the end
        assert log.position() == length
        assert log.truncate(length)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'{"kind": "train"}\n{"kind"\n{"kind": "eval"}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path / "m")
    with pytest.raises(UserError, match="cannot read"):
        read_metrics(tmp_path / "missing")


def test_a_file_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    """By a resume; in a process of its own, which a memory map of the file would end by SIGBUS."""
    path, line = tmp_path / "metrics.jsonl", b'{"kind": "event"}\n'
    path.write_bytes(line * 200_000)

    def read() -> None:
        blocks = blocks_of_lines(path)
        assert set(next(blocks).splitlines(keepends=True)) == {line}
        os.truncate(path, 100)
        assert b"".join(blocks).strip(line) == b""

    assert run_forked(read).returncode == 0


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        MetricsLog(tmp_path / "missing" / "m")


class _FullDisk:
    """A raw file on a disk with `room` bytes left; writes what fits, as the operating system does."""

    def __init__(self, file: object, room: int) -> None:
        self._file = file
        self.room = room

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self.room])  # type: ignore[attr-defined]
        self.room -= written
        return written

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def test_a_full_disk_delays_lines_and_loses_none(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "log")
    file.append("first")
    disk = _FullDisk(file._file, room=4)
    file._file = disk  # type: ignore[assignment]
    file.append("second")
    file.append("third")
    assert (tmp_path / "log").read_text() == "first\n"  # nothing half-written
    with pytest.raises(UserError, match="No space left"):
        file.position()
    disk.room = 10**6
    file.append("fourth")
    assert (tmp_path / "log").read_text() == "first\nsecond\nthird\nfourth\n"
    assert file.position() == 26
    disk.room = 0
    file.append("fifth")
    with pytest.raises(UserError, match="No space left"):
        file.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_dev_full_is_a_full_disk() -> None:
    file = AppendFile(Path("/dev/full"))
    file.append("line")
    with pytest.raises(UserError, match="No space left"):
        file.position()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
def test_sigkill_loses_no_written_line(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from gptlab.runtime.records.metrics import MetricsLog
        log = MetricsLog(Path({str(tmp_path / "m")!r}))
        for step in range(100):
            log.write("train", step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert [r["step"] for r in read_metrics(tmp_path / "m")] == list(range(100))


def test_importing_the_light_parts_imports_no_torch() -> None:
    code = (
        "import sys, gptlab.runtime.records.metrics, gptlab.runtime.records.console, "
        "gptlab.runtime.records.run_directory, "
        "gptlab.runtime.records.provenance, gptlab.runtime.hardware.cpu\n"
        "assert not {'torch', 'rich', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
