"""The engine for a static list of hosts, on each of which a launcher such as ssh starts one agent."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from nsa_harness.engine.interface import Capabilities, EngineError, Job, JobHandle, NodeOutput, Script
from nsa_harness.engine.local import LocalEngine
from nsa_harness.errors import UsageError

_FIRST_PORT, _PORTS = 20000, 20000
_EXEC_S = 60.0
_PID_FILE = "agent-{}.pid"
_NO_ADDRESS = "none"  # of a host whose name is its address


class HostsEngine(LocalEngine):
    """Starts the agents from this machine. All hosts must see the directory of the job under the same path."""

    name = "hosts"

    def capabilities(self) -> Capabilities:
        if not self.site.hosts:
            return Capabilities(missing="the site file names no host; add `hosts:` with a name and an address for each")
        return Capabilities(nodes=len(self.site.hosts))

    def idle_nodes(self) -> Sequence[str]:
        """Return all hosts, because nothing is known about their other jobs."""
        return list(self.site.hosts)

    def render(self, job: Job) -> Script:
        numbers = {host: number for number, host in enumerate(self.site.hosts)}
        hosts = [host for host in numbers if not job.only or host in job.only][: job.nodes]
        if len(hosts) < job.nodes:
            raise UsageError(f"--nodes: {job.nodes} nodes, but the site file names only {len(hosts)} hosts")
        address = self.site.rendezvous or self.site.hosts[hosts[0]] or hosts[0].rpartition("@")[2]
        port = _FIRST_PORT + int(hashlib.sha256(job.name.encode()).hexdigest(), 16) % _PORTS
        # torchrun finds out by the host's name which node hosts the meeting, which fails for some names.
        options = ['"--rdzv-conf=is_host=$1"', '${address:+"--local-addr=$address"}']
        launches = []
        for host in hosts:
            is_first = str(int(host == hosts[0]))
            # ssh joins the words with blanks for a shell on the host, so an empty word would vanish.
            arguments = shlex.join(["bash", "-s", is_first, self.site.hosts[host] or _NO_ADDRESS, str(numbers[host])])
            launches.append(f"node | {self._launcher(host)} {arguments} & agents+=($!)")
        return self._script(
            job,
            [
                "#!/bin/bash",
                "set -u",
                "agents=()",
                "node() { cat <<'END_OF_NODE'",
                f"cd {shlex.quote(str(job.cwd))} || exit 1",
                f'address="$2"; [ "$address" != {_NO_ADDRESS} ] || address=""',
                *job.site.setup_commands(),
                *job.exports(),
                f"echo $$ > {shlex.quote(str(job.directory))}/{_PID_FILE.format('$3')}",
                f"exec {job.node_command(job.name, f'{address}:{port}', options)} < /dev/null",
                "END_OF_NODE",
                "}",
                *launches,
                "status=0",
                'for agent in "${agents[@]}"; do wait "$agent" || status=$?; done',
                'exit "$status"',
            ],
        )

    def _launcher(self, host: str) -> str:
        return self.site.launcher.format(host=shlex.quote(host))

    def exec_on_nodes(self, handle: JobHandle, command: Sequence[str]) -> Iterator[NodeOutput]:
        for number, host in self._hosts_of(handle):
            yield self._exec(host, f"set -- {number}; {shlex.join(command)} < /dev/null")

    def _exec(self, host: str, script: str) -> NodeOutput:
        command = [*shlex.split(self._launcher(host)), "bash", "-s"]
        try:
            result = subprocess.run(
                command, input=script + "\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", timeout=_EXEC_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{host}: {command[0]} could not start a command: {error}") from None
        return NodeOutput(node=host, text=result.stdout, status=result.returncode)

    def _hosts_of(self, handle: JobHandle) -> Iterator[tuple[int, str]]:
        """Yield the number and the name of each host on which an agent of the job has started."""
        for number, host in enumerate(self.site.hosts):
            if (Path(handle.directory) / _PID_FILE.format(number)).exists():
                yield number, host

    def _ask_to_end(self, handle: JobHandle, processes: Sequence[psutil.Process]) -> None:  # noqa: ARG002
        """Send SIGTERM to the agent of each host."""
        for number, host in self._hosts_of(handle):
            file = shlex.quote(str(Path(handle.directory) / _PID_FILE.format(number)))
            with contextlib.suppress(EngineError):
                self._exec(host, f'kill -TERM "$(cat {file})"')
