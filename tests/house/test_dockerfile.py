"""The Dockerfile: all that it copies is there, it ends without root, and it builds where Docker runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def docker_runs() -> bool:
    """With the base image at hand: a daemon without a registry builds nothing."""
    if shutil.which("docker") is None:
        return False
    base = re.findall(r"^FROM (\S+)", TEXT, re.M)[0]
    return subprocess.run(["docker", "image", "inspect", base], capture_output=True, timeout=60).returncode == 0


def test_copies_what_is_there() -> None:
    copied = [word for line in re.findall(r"^COPY (.*)", TEXT, re.M) for word in line.split()[:-1]]
    assert {"constraints.txt", "pyproject.toml", "gptlab"} <= {*copied}
    assert [word for word in copied if not (ROOT / word).exists()] == []


def test_runs_without_root() -> None:
    *_, user = re.findall(r"^USER (.*)", TEXT, re.M)
    assert user == "gptlab"
    assert TEXT.index("\nUSER gptlab") > TEXT.rindex("\nRUN ")


def test_every_user_may_write_the_cache() -> None:
    """As `docker run --user` makes necessary; not below a home folder, which others may not enter."""
    (cache,) = re.findall(r"^ENV GPTLAB_CACHE=(/\w+)$", TEXT, re.M)
    assert re.search(rf"^RUN .*mkdir -m 1777 {cache}$", TEXT, re.M)


@pytest.mark.skipif(not docker_runs(), reason="no Docker daemon with the base image here")
@pytest.mark.timeout(1800)
def test_builds_and_answers() -> None:
    subprocess.run(["docker", "build", "-q", "-t", "gptlab-test", "."], cwd=ROOT, check=True)
    done = subprocess.run(["docker", "run", "--rm", "gptlab-test", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("gptlab ")
    train = ["train", "--depth", "1", "--steps", "1", "--run-dir", "/tmp/run"]
    subprocess.run(["docker", "run", "--rm", "--user", "12345", "gptlab-test", *train], check=True)
