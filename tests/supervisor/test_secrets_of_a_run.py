"""A real run whose program, options and environment are full of secrets: no byte of what is written shows one."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
# The program's own output, and what is kept to repeat the run: docs/security.md names them.
KEPT = {"spec.json", "plan.json", "output.log", "stdout.log", "stderr.log"}
ARGUMENTS = ("--pat=argvPat77xZ", "--auth", "bob:aUthPw55", "-p", "sh0rtOptPw9", "--url", "postgres://u:pa/ss77q@h/db",
             "--api-key", "k3yArgv12")  # fmt: skip
ENVIRONMENT = {
    "VNC_PASSWORD": "ubuntu",
    "DB_PASSWORD": "exception",
    "MY_PAT": "env9PatX7y2Q",
    "A_CREDENTIAL": "w,d(c&x7",
}
HOOK = "/".join(("https://hooks.slack.com/services", "T0AB12CD3", "B0AB12CD3", "aB3dE5fG7hI9jK1lM3nO5pQ7"))
PROGRAM = f"""
import argparse, os, sys
api_key = "q1w2srcLit9Zk3"

def connect(url, token="dEf4ultTok3nXy", **options):
    raise RuntimeError(f"refused {{url}} password=Exc3pt10n,Pw(x {{sys.argv}} {{os.environ['MY_PAT']}} as "
                       f"{{os.environ['A_CREDENTIAL']}} or {{os.environ['VNC_PASSWORD']}}")

parser = argparse.ArgumentParser()
for option in ("--pat", "--auth", "-p", "--url", "--api-key"):
    parser.add_argument(option)
options = parser.parse_args()
print(options, dict(os.environ), "hook {HOOK}", flush=True)
print("\\x1b[31mpassword\\x1b[0m=\\x1b[32mAns1C0l0red\\x1b[0m", flush=True)
print("password:\\n  Tw0L1nes#X", file=sys.stderr, flush=True)
connect(options.url, key="pos1tK3yInCall8")
"""
SECRETS = (
    "argvPat77xZ", "aUthPw55", "sh0rtOptPw9", "pa/ss77q", "k3yArgv12", "env9PatX7y2Q", "w,d(c&x7", "q1w2srcLit9Zk3",
    "dEf4ultTok3nXy", "Exc3pt10n", HOOK.rpartition("/")[2], "Ans1C0l0red", "Tw0L1nes#X", "pos1tK3yInCall8",
)  # fmt: skip


def shown_in(directory: Path, kept: set[str]) -> list[tuple[str, str]]:
    """Return each file below a directory that contains a secret, with the secret."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name not in kept]
    assert len(files) > 10
    return [(path.name, secret) for path in files for secret in SECRETS if secret.encode() in path.read_bytes()]


@pytest.mark.slow
def test_no_byte_that_a_run_writes_or_prints_shows_a_secret(tmp_path: Path) -> None:
    home = tmp_path / "ubuntu"  # as the password: paths must stay as they are
    home.mkdir()
    (home / "train.py").write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "_NSA_"))}
    printed = {}
    for name, words, variables in (
        ("run", ["run", "--script", "train.py", "--ranks", "1", "--", *ARGUMENTS], ENVIRONMENT),
        ("report", ["report"], {}),  # in another environment
        ("prompt", ["report", "--prompt"], {}),
        ("bundle", ["export", "--to", "run.tar.gz"], {}),
    ):
        done = subprocess.run(
            [Path(sys.executable).parent / "nsa-harness", *words],
            cwd=home, env={**inherited, **variables}, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        printed[name] = done.stdout + done.stderr
        assert not [secret for secret in SECRETS if secret in printed[name]], printed[name]
        if name == "run":
            run = (home / "reports" / "latest").resolve()
            first = (run / "report.json").read_text()
    assert shown_in(run, KEPT) == []
    with tarfile.open(home / "run.tar.gz") as bundle:
        bundle.extractall(home / "unpacked", **SAFELY)
    assert shown_in(home / "unpacked", set()) == []
    assert (run / "report.json").read_text() == first  # the same number for each secret
    assert "cause     exception" in printed["run"]
    assert "ubuntu/train.py:6" in (run / "SUMMARY.md").read_text()
