"""`nsa-harness run --engine hosts` with a real server of ssh on this machine, and a key made for the test."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.slurm_lab import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "cluster_job.py"
COMMAND = str(Path(sys.executable).parent / "nsa-harness")
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_CONFIGURATION = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {home}/host_key
AuthorizedKeysFile {home}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """Start a server of ssh, and yield the command that starts a program through it."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("the server of ssh is not installed; `make cluster-test` installs it")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    home = tmp_path / "ssh"
    home.mkdir(mode=0o700)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (home / "sshd_config").write_text(_CONFIGURATION.format(port=port, home=home))
    options = ["-F", "none", "-i", str(home / "user_key"), "-p", str(port), "-l", getpass.getuser()]
    for option in ("BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"):
        options += ["-o", option]
    with (home / "sshd.log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(home / "sshd_config")], stderr=log)
    launcher = " ".join(["ssh", *options])
    try:
        try_it = [*launcher.split(), "localhost", "true"]
        wait_until(lambda: subprocess.run(try_it, capture_output=True, check=False).returncode == 0, "no ssh")
        yield launcher
    finally:
        server.terminate()
        server.wait(timeout=30)


def start(directory: Path, ssh: str, *words: str) -> subprocess.Popen[str]:
    """Start a run with four ranks on the two hosts localhost and 127.0.0.1."""
    (directory / "site.yaml").write_text(
        f'hosts: {{localhost: 127.0.0.1, "127.0.0.1": null}}\nlauncher: {ssh} {{host}}\n'
        "env: {GLOO_SOCKET_IFNAME: lo}\n"
    )
    command = [COMMAND, "run", str(PROGRAM), "--engine=hosts", "--site=site.yaml", "--nodes=2", "--ranks=4", *words]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(directory: Path, command: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    output = command.communicate(timeout=400)[0]
    report = json.loads((directory / "reports" / "latest" / "report.json").read_text())
    return command.returncode, report["outcomes"][-1], output


def processes_in(directory: Path) -> list[str]:
    """Return the command lines of all processes that work on a run in this directory."""
    lines = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            is_here = process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        lines += [line] if is_here and process.pid != os.getpid() else []
    return lines


def test_a_healthy_and_a_deadlocked_job_run_through_ssh(tmp_path: Path, ssh: str) -> None:
    code, outcome, output = end(tmp_path, start(tmp_path, ssh))
    assert (code, outcome["verdict"]) == (0, "PASS"), output
    assert outcome["exit_codes"] == {"0": 0, "1": 0, "2": 0, "3": 0}
    code, outcome, output = end(tmp_path, start(tmp_path, ssh, "limits.stall_s=10", "--", "deadlock"))
    assert (code, outcome["verdict"], outcome["culprit"]["ranks"]) == (124, "HANG", [3]), output
    assert outcome["detail"]["repeat"].endswith(f"--engine hosts --nodes 2 --site {tmp_path}/site.yaml")
    wait_until(lambda: processes_in(tmp_path) == [], f"left: {processes_in(tmp_path)}")


def test_ctrl_c_ends_the_ranks_on_the_hosts(tmp_path: Path, ssh: str) -> None:
    command = start(tmp_path, ssh, "--", "endless")
    file = tmp_path / "reports" / "latest" / "cluster_job" / "output.log"
    wait_until(lambda: file.exists() and file.read_text().count("trained") == 4, "no training", 300)
    command.send_signal(signal.SIGINT)
    code, outcome, output = end(tmp_path, command)
    assert (code, outcome["cause"]) == (130, "interrupted"), output
    wait_until(lambda: processes_in(tmp_path) == [], f"left: {processes_in(tmp_path)}", 120)


def test_a_host_that_refuses_the_key_is_no_fault_of_the_program(tmp_path: Path, ssh: str) -> None:
    (tmp_path / "ssh" / "user_key.pub").write_text("")
    code, outcome, output = end(tmp_path, start(tmp_path, ssh))
    assert (code, outcome["cause"]) == (125, "infra"), output
    assert "Permission denied" in outcome["summary"]
