"""The engine for this machine. Its job is a process in the background, which outlives the terminal that started it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from nsa_harness.engine.interface import (
    OUTPUT,
    Capabilities,
    EngineError,
    Job,
    JobHandle,
    JobState,
    JobStatus,
    NodeOutput,
    Script,
    Unreachable,
)
from nsa_harness.engine.site import Site
from nsa_harness.supervisor.launch.reaper import process_identity

_GRACE_S = 20.0  # from SIGTERM to SIGKILL; an agent writes its report in this time
_EXIT, _PID, _CANCELLED = "job.exit", "job.pid", "job.cancelled"
# The shell notes its pid first and the exit status last, so that any later process can find both.
_WRAPPER = """\
trap '' HUP
echo "$$ $(cut -d' ' -f22 /proc/$$/stat)" > "$1/job.pid.new" && mv "$1/job.pid.new" "$1/job.pid"
bash "$2" > "$1/output.log" 2>&1 < /dev/null
echo $? > "$1/job.exit.new" && mv "$1/job.exit.new" "$1/job.exit"
"""


class LocalEngine:
    """Starts the job's script on this machine, in a session of its own."""

    name = "local"

    def __init__(self, site: Site) -> None:
        self.site = site

    def capabilities(self) -> Capabilities:
        return Capabilities(nodes=1)

    def mistakes(self, nodes: int, gpus_per_node: int) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        yield from ()

    def idle_nodes(self) -> Sequence[str]:
        return [socket.gethostname()]

    def render(self, job: Job) -> Script:
        command = job.node_command(job.name, "localhost:0")
        lines = [
            "#!/bin/bash",
            "set -u",
            f"cd {shlex.quote(str(job.cwd))} || exit 1",
            *job.site.setup_commands(),
            *job.exports(),
        ]
        return self._script(job, [*lines, f"exec {command}"])

    def _script(self, job: Job, lines: Sequence[str]) -> Script:
        file = job.directory / "job.sh"
        return Script(file=file, text="\n".join(lines) + "\n", command=("bash", str(file)), name=job.name)

    def submit(self, script: Script, env: Mapping[str, str]) -> JobHandle:
        folder = script.file.parent
        for name in (_EXIT, _PID, _CANCELLED, OUTPUT):
            (folder / name).unlink(missing_ok=True)
        try:
            process = subprocess.Popen(
                ["bash", "-c", _WRAPPER, "bash", str(folder), str(script.file)], env=dict(env), cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EngineError(f"the job could not be started: {error.strerror}") from None
        identity = process_identity(process.pid)
        started = str(identity.start_ticks) if identity else "0"
        return self._handle(folder, str(process.pid), started)

    def _handle(self, folder: Path, pid: str, started: str) -> JobHandle:
        facts = {"host": socket.gethostname(), "started": started}
        return JobHandle(engine=self.name, id=pid, directory=str(folder), facts=facts)

    def find(self, script: Script) -> JobHandle | None:
        try:
            pid, started = (script.file.parent / _PID).read_text().split()
        except (OSError, ValueError):
            return None
        return self._handle(script.file.parent, pid, started)

    def poll(self, handle: JobHandle) -> JobStatus:
        folder = Path(handle.directory)
        # Asked before the file is read, because the process writes the file just before it ends.
        is_alive = self._process(handle) is not None
        try:
            status = int((folder / _EXIT).read_text())
        except (OSError, ValueError):
            if is_alive:
                return JobStatus(state=JobState.RUNNING, nodes=handle.facts["host"])
            status = None
        if (folder / _CANCELLED).exists():
            return JobStatus(state=JobState.CANCELLED, reason="somebody cancelled the job", exit_code=status)
        if status is None:
            return JobStatus(state=JobState.LOST, reason=f"process {handle.id} ended without an exit status")
        return JobStatus(state=JobState.FAILED if status else JobState.COMPLETED, exit_code=status)

    def exec_on_nodes(self, handle: JobHandle, command: Sequence[str]) -> Iterator[NodeOutput]:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        yield NodeOutput(node=handle.facts["host"], text=result.stdout, status=result.returncode)

    def cancel_command(self, handle: JobHandle) -> str:
        return f"pkill -TERM --session {handle.id}"

    def cancel(self, handle: JobHandle) -> None:
        process = self._process(handle)
        if process is None:
            return
        (Path(handle.directory) / _CANCELLED).touch()
        processes = process.children(recursive=True)
        self._ask_to_end(handle, processes)
        psutil.wait_procs(processes[:1], timeout=_GRACE_S)  # the agent ends its ranks itself
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        with contextlib.suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
            process.wait(timeout=_GRACE_S)

    def _ask_to_end(self, handle: JobHandle, processes: Sequence[psutil.Process]) -> None:  # noqa: ARG002
        """Send SIGTERM to the agent, which is the first process below the job's shell."""
        for one in processes[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGTERM)

    def _process(self, handle: JobHandle) -> psutil.Process | None:
        """Return the process of the job's shell, or None if it has ended. Raise Unreachable on another machine."""
        if handle.facts["host"] != socket.gethostname():
            raise Unreachable(f"the job runs on {handle.facts['host']}, and this is {socket.gethostname()}")
        with contextlib.suppress(ChildProcessError):
            os.waitpid(int(handle.id), os.WNOHANG)
        identity = process_identity(int(handle.id))
        if identity is None or str(identity.start_ticks) != handle.facts["started"] or not identity.is_alive():
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(int(handle.id))
        return None
