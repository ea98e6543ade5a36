"""What `doctor` learns from child processes: imports, the probe's way in, py-spy. Each has a limit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsa_harness import protocol
from nsa_harness.core.doctor.facts import ModuleFacts, PySpyFacts, PythonFacts, TorchFacts, Unknown
from nsa_harness.supervisor.capture.stacks import py_spy, py_spy_path
from nsa_harness.supervisor.launch.launcher import BOOTSTRAP

_IMPORT_LIMIT_S = 90.0  # torch from a cold network file system
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_ANSWER = "nsa-harness answers: "  # a package may print on import

_TORCH = """
import json, torch
import torch.distributed as distributed
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "gloo": False, "nccl": None, "torchrun": None}
facts["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
if distributed.is_available():
    facts["gloo"] = distributed.is_gloo_available()
    if distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
try:
    import torch.distributed.run
except Exception as error:
    facts["torchrun"] = f"{type(error).__name__}: {error}"
"""
_MODULE = """
import importlib, importlib.metadata, importlib.util, sys
name, package = sys.argv[1:3]
facts = {"found": importlib.util.find_spec(name) is not None, "version": None, "trouble": None}
try:
    facts["version"] = importlib.metadata.version(package)
except importlib.metadata.PackageNotFoundError:
    pass
if facts["found"]:
    try:
        module = importlib.import_module(name)
        facts["version"] = facts["version"] or str(getattr(module, "__version__", "of unknown version"))
    except BaseException as error:
        facts["trouble"] = f"{type(error).__name__}: {error}"
"""
_PRINT_FACTS = f"\nimport json; print({_ANSWER!r} + json.dumps(facts), flush=True)\n"
_WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"


def torch_facts(environ: Mapping[str, str] | None = None) -> TorchFacts | Unknown:
    answer = _facts_of(_TORCH, environ=environ)
    if isinstance(answer, Unknown):
        return answer
    return TorchFacts(
        version=answer["version"],
        cuda=answer["cuda"],
        devices=answer["devices"],
        gloo=answer["gloo"],
        nccl=answer["nccl"],
        torchrun_trouble=answer["torchrun"],
    )


def module_facts(module: str, package: str, environ: Mapping[str, str] | None = None) -> ModuleFacts:
    """Found is not enough: a build for another torch is found, and fails on import."""
    answer = _facts_of(_MODULE, module, package, environ=environ)
    if isinstance(answer, Unknown):  # the import ended the process, or took too long: so something is there
        return ModuleFacts(version="a build", trouble=answer.why)
    if not answer["found"]:
        return ModuleFacts(version=None, trouble=None)
    trouble = answer["trouble"]
    return ModuleFacts(version=answer["version"] or "a build", trouble=trouble and _last_line(trouble))


def python_facts(environ: Mapping[str, str] | None = None) -> PythonFacts:
    """Starts a child as a rank is started, and looks whether the probe has written its board."""
    environ = os.environ if environ is None else environ
    with tempfile.TemporaryDirectory(prefix="nsa-harness-doctor-") as boards:
        path = [str(BOOTSTRAP), *filter(None, [environ.get("PYTHONPATH", "")])]
        ours = {
            "PYTHONPATH": os.pathsep.join(path),
            "RANK": "0",
            "WORLD_SIZE": "1",
            protocol.ENV_BOARDS: boards,
            protocol.ENV_PROBE: protocol.PROBE_BOARD,
        }
        answer = _facts_of("facts = {}", environ={**environ, **ours})
        written = any(Path(boards).glob(protocol.BOARD.format(pid="*")))
    silent = None if written else "its board is not there"
    trouble = answer.why if isinstance(answer, Unknown) else silent
    return PythonFacts(version=".".join(map(str, sys.version_info[:3])), probe_trouble=trouble)


def py_spy_facts(ptrace_scope: Path = _PTRACE_SCOPE) -> PySpyFacts:
    """Really dumps a child, as a watcher dumps a rank."""
    path = shutil.which(py_spy_path())
    scope = _number(ptrace_scope)
    if path is None:
        return PySpyFacts(path=None, threads=0, trouble=None, ptrace_scope=scope)
    child = subprocess.Popen([sys.executable, "-I", "-c", _WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    failures: list[str] = []
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        stacks, _ = py_spy(child.pid, [], failures)
        child.kill()
    return PySpyFacts(path=path, threads=len(stacks), trouble="; ".join(failures) or None, ptrace_scope=scope)


def _facts_of(code: str, *words: str, environ: Mapping[str, str] | None = None) -> dict[str, Any] | Unknown:
    """What `code` leaves in `facts`, or why it could not."""
    # The working directory may hold a module that shadows one that is asked for.
    command = [sys.executable, "-P", "-c", code + _PRINT_FACTS, *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_LIMIT_S,
            env=None if environ is None else dict(environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Unknown(why=f"did not end within {_IMPORT_LIMIT_S:g} s")
    except OSError as error:
        return Unknown(why=f"{sys.executable} cannot be started: {error.strerror or error}")
    answers = [line.removeprefix(_ANSWER) for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if answers:
        facts: dict[str, Any] = json.loads(answers[-1])
        return facts
    return Unknown(why=_last_line(done.stderr) or _ended(done.returncode))


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
