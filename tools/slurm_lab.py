"""Start and stop a real Slurm cluster on this machine, for the tests and for the examples of docs/slurm.md.

The cluster has one controller and two or more nodes with two cores and four pretended GPUs each. All its files are in
one directory, and all its daemons run as root on 127.0.0.1. The Debian packages slurmctld, slurmd, slurm-client and
munge must be installed; `make cluster-test` installs them. With accounting, slurmdbd and mariadb-server are needed too.

    python tools/slurm_lab.py up /tmp/lab          # prints the variables that the commands of Slurm need
    python tools/slurm_lab.py down /tmp/lab
    python tools/slurm_lab.py up /tmp/lab --accounting
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue", "scancel", "srun")
ACCOUNTING_PROGRAMS = ("slurmdbd", "sacct", "sacctmgr", "mariadbd", "mariadb-install-db")
_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldLogFile={home}/log/slurmctld.log
SlurmdLogFile={home}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdTimeout={node_timeout_s}
MinJobAge={forget_s}
SlurmdParameters=config_overrides
JobCompType=jobcomp/none
GresTypes=gpu
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes={names} MaxTime=1 State=UP
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
{accounting}"""
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={home}/munge/socket
"""
_DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=root
StorageLoc=slurm
LogFile={home}/log/slurmdbd.log
PidFile={home}/slurmdbd.pid
"""
_START_S, _STOP_S = 60.0, 30.0


def missing_reason(*, accounting: bool = False) -> str:
    """Return why no cluster can be started here, or "" if one can."""
    programs = (*PROGRAMS, *(ACCOUNTING_PROGRAMS if accounting else ()))
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed; `make cluster-test` installs the Debian packages"
    return "" if os.geteuid() == 0 else "the daemons of Slurm must be started by root"


@dataclass(frozen=True, kw_only=True)
class SlurmLab:
    """A cluster in the directory `home`. The daemons keep running when this process ends, until `stop` is called."""

    home: Path
    nodes: int = 2
    node_timeout_s: int = 10  # how long a node may be silent before its jobs end with NODE_FAIL
    forget_s: int = 300  # how long the controller knows a job that has ended
    accounting: bool = False  # start slurmdbd with a database, so that sacct answers

    @property
    def names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the commands of Slurm, and PyTorch in a job, need on this cluster."""
        return {"SLURM_CONF": str(self.home / "etc" / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo"}

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle. If that fails, stop them and raise RuntimeError."""
        if reason := missing_reason(accounting=self.accounting):
            raise RuntimeError(reason)
        for name in ("etc", "state", "log", "munge", *(f"spool.{node}" for node in self.names)):
            (self.home / name).mkdir(parents=True, exist_ok=True)
        self._write_configuration()
        munge = self.home / "munge"
        (munge / "key").touch(mode=0o600)
        (munge / "key").write_bytes(os.urandom(1024))
        try:
            files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            self._daemon(
                "munged", ["munged", "--foreground", *(f"--{key}={munge / name}" for key, name in files.items())]
            )
            wait_until(lambda: (munge / "socket").is_socket(), "munged has no socket")
            if self.accounting:
                self._start_accounting()
            self._daemon("slurmctld", ["slurmctld", "-D", "-c", "-f", self.environment["SLURM_CONF"]])
            for node in self.names:
                self.start_node(node)
            wait_until(self._all_idle, f"not every node became idle; see {self.home}/log")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel all jobs, stop all daemons, and end every process that still belongs to the cluster."""
        if self._pid("slurmctld") and self.slurm("scancel", "--user=root") is not None:
            with contextlib.suppress(RuntimeError):
                wait_until(lambda: self.slurm("squeue", "--noheader") == "", "jobs did not end", _STOP_S)
        for name in [*(f"slurmd.{node}" for node in self.names), "slurmctld", "slurmdbd", "mariadbd", "munged"]:
            if pid := self._pid(name):
                _end(pid)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.processes(), "processes of the cluster did not end", _STOP_S)

    def _start_accounting(self) -> None:
        """Start a database and slurmdbd, and add this cluster to it."""
        data, port = self.home / "database", _read_port(self.home / "etc" / "slurmdbd.conf")
        own = ["--no-defaults", f"--datadir={data}", "--user=root"]
        install = ["mariadb-install-db", *own, "--auth-root-authentication-method=normal", "--skip-test-db"]
        if not data.exists():
            subprocess.run(install, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        network = ["--bind-address=127.0.0.1", f"--port={port}", f"--socket={self.home}/database.socket"]
        self._daemon("mariadbd", ["mariadbd", *own, *network, "--innodb-buffer-pool-size=64M"])
        wait_until(lambda: _answers(port), "the database does not answer")
        # slurmdbd reads the configuration beside the one of the cluster, and no other user may read it.
        (self.home / "etc" / "slurmdbd.conf").chmod(0o600)
        self._daemon("slurmdbd", ["slurmdbd", "-D"])
        added = ("sacctmgr", "--immediate", "add", "cluster", "lab")
        wait_until(lambda: self.slurm(*added) is not None, "slurmdbd does not answer")

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._daemon(f"slurmd.{name}", ["slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"]])

    def kill_node(self, name: str) -> None:
        """Kill the daemon of a node and everything that runs there, as if the node had lost its power."""
        for pid in filter(None, [self._pid(f"slurmd.{name}"), *(p for p in self.processes() if self._is_on(name, p))]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def slurm(self, *command: str) -> str | None:
        """Return what a command of Slurm prints, without the line break at the end, or None if it fails."""
        result = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False, timeout=60
        )
        return result.stdout.strip() if result.returncode == 0 else None

    def processes(self) -> list[int]:
        """Return the process ids of all daemons and jobs of this cluster that are alive."""
        return list(filter(self._belongs_here, _pids()))

    def _belongs_here(self, pid: int) -> bool:
        command, environ = _proc(pid, "cmdline"), _proc(pid, "environ")
        daemons = (f"--key-file={self.home}/munge/key", f"-f {self.environment['SLURM_CONF']}", f"{self.home}/database")
        if any(text in command for text in daemons):
            return True
        # A shell in which a user works has SLURM_CONF too, but only a job has the name of its node.
        is_job = "SLURMD_NODENAME=" in environ or command.startswith(("slurmstepd", "slurmdbd"))
        return is_job and f"SLURM_CONF={self.environment['SLURM_CONF']}" in environ

    def _is_on(self, node: str, pid: int) -> bool:
        if _proc(pid, "cmdline").startswith("slurmstepd"):
            return any(file.endswith(f"/slurmd.{node}.log") for file in _open_files(pid))
        return f"SLURMD_NODENAME={node} " in _proc(pid, "environ")

    def _write_configuration(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(self.nodes + 3)
        *_, dbd_port, database_port = ports
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=8000 Gres=gpu:4"
            for name, port in zip(self.names, ports[1:-2], strict=True)
        )
        conf = _CONF.format(
            host=host, home=self.home, controller_port=ports[0], nodes=nodes, names=",".join(self.names),
            node_timeout_s=self.node_timeout_s, forget_s=self.forget_s,
            accounting=_ACCOUNTING.format(home=self.home, port=dbd_port) if self.accounting else "",
        )  # fmt: skip
        (self.home / "etc" / "slurm.conf").write_text(conf)
        dbd = _DBD_CONF.format(home=self.home, host=host, port=dbd_port, database_port=database_port)
        (self.home / "etc" / "slurmdbd.conf").write_text(dbd)
        # A pretended GPU needs a device file, and any four do.
        (self.home / "etc" / "gres.conf").write_text(f"NodeName={','.join(self.names)} Name=gpu File=/dev/tty[0-3]\n")

    def _all_idle(self) -> bool:
        states = self.slurm("sinfo", "--Node", "--noheader", "--partition=main", "--format=%T")
        return states is not None and states.split() == ["idle"] * self.nodes

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        with (self.home / "log" / f"{name}.out").open("ab") as output:
            daemon = subprocess.Popen(
                command, env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        (self.home / f"{name}.json").write_text(json.dumps([daemon.pid, _start_ticks(daemon.pid)]))

    def _pid(self, name: str) -> int | None:
        """Return the pid of a daemon that is alive, or None."""
        try:
            pid, started = json.loads((self.home / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None
        return int(pid) if started is not None and _start_ticks(pid) == started else None


def wait_until(is_met: Callable[[], bool], otherwise: str, limit_s: float = _START_S) -> None:
    """Wait until a condition is met. Raise RuntimeError with the text `otherwise` if it is not met in time."""
    deadline = time.monotonic() + limit_s
    while not is_met():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} within {limit_s:g} s")
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _read_port(configuration: Path) -> int:
    lines = configuration.read_text().splitlines()
    return next(int(line.partition("=")[2]) for line in lines if line.startswith("StoragePort="))


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(RuntimeError):
            wait_until(lambda: _start_ticks(pid) is None, f"process {pid} did not end", 10.0)
            return
        os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _start_ticks(pid: int) -> int | None:
    """Return the start time of a process, which distinguishes it from a later one with the same pid, or None."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # a daemon that this process has started is a zombie until it is reaped
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(file)


def main() -> int:
    """Start or stop the cluster that the command line names, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["up", "down"])
    parser.add_argument("home", type=Path)
    parser.add_argument("--accounting", action="store_true", help="also start slurmdbd, so that sacct answers")
    arguments = parser.parse_args()
    lab = SlurmLab(home=arguments.home.resolve(), accounting=arguments.accounting)
    try:
        lab.start() if arguments.action == "up" else lab.stop()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.action == "up":
        print(*(f"export {name}={value}" for name, value in lab.environment.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
