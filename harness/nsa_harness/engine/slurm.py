"""The engine for Slurm. It uses the commands of Slurm as a person would, and needs no accounting."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
from nsa_harness.engine.slurm_facts import (
    NodeFacts,
    Partition,
    feature_names,
    parse_nodes,
    parse_partitions,
    parse_time_limit,
)
from nsa_harness.engine.slurm_output import parse_job_id, parse_sacct, parse_show_job
from nsa_harness.errors import did_you_mean
from nsa_harness.texts.words import plural, seconds

_TIMEOUT_S = 60.0
_UNKNOWN_JOB = "Invalid job id"
_LIMIT_MARGIN_S = 300.0  # the agent ends a job at its deadline; Slurm is only the backstop
# The nodes meet on the first one. Its address is the one by which the controller of Slurm reaches it.
_RENDEZVOUS = """\
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node -o "$first_node" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
endpoint="${address:-$first_node}:$((20000 + SLURM_JOB_ID % 20000))\""""


class SlurmEngine:
    """Submits jobs with sbatch and follows them with scontrol, or with sacct once the controller forgot them."""

    name = "slurm"

    def __init__(self, site: Site) -> None:
        self.site = site

    def capabilities(self) -> Capabilities:
        if shutil.which("sbatch") is None:
            return Capabilities(missing="there is no sbatch on PATH; start nsa-harness on a login node of the cluster")
        try:
            nodes = self._nodes()
        except EngineError as error:
            return Capabilities(missing=str(error))
        if not nodes and not self.site.partition:
            return Capabilities(missing="no node is known")
        return Capabilities(nodes=len(nodes) or None, gpus_per_node=max((node.gpus for node in nodes), default=None))

    def mistakes(self, nodes: int, gpus_per_node: int) -> Iterator[tuple[str, str]]:
        site, known = self.site, self._partitions()
        names = [partition.name for partition in known]
        for name in (site.partition or "").split(",") if site.partition and known else ():
            if name not in names:
                yield "partition", f'no partition "{name}"; there are {", ".join(names)}{did_you_mean(name, names)}'
                return  # the other settings depend on it
        chosen = self._chosen()
        where = f"the partition {' or '.join(partition.name for partition in chosen)}"
        if chosen and all(partition.max_nodes is not None and partition.max_nodes < nodes for partition in chosen):
            most = max(partition.max_nodes or 0 for partition in chosen)
            yield "nodes", f"{nodes} nodes, but {where} gives a job at most {most}"
        longest_s = _longest_s(chosen)
        if site.time_limit and longest_s is not None and (parse_time_limit(site.time_limit) or math.inf) > longest_s:
            yield "time_limit", f"{site.time_limit}, but {where} gives a job at most {seconds(longest_s)}"
        yield from self._mistakes_about_nodes(where, gpus_per_node)

    def _mistakes_about_nodes(self, where: str, gpus_per_node: int) -> Iterator[tuple[str, str]]:
        nodes = self._nodes()
        if not nodes:
            return
        if gpus_per_node and not any(node.gpus for node in nodes):
            yield "gpus_per_node", f"{gpus_per_node}, but no node of {where} has GPUs that Slurm knows"
        cpus = max(node.cpus for node in nodes)
        if self.site.cpus_per_node is not None and self.site.cpus_per_node > cpus:
            yield (
                "cpus_per_node",
                f"{self.site.cpus_per_node}, but a node of {where} has at most {plural(cpus, 'core')}",
            )
        features = sorted({feature for node in nodes for feature in node.features})
        for name in feature_names(self.site.constraint or ""):
            if name not in features:
                known = f"there are {', '.join(features)}" if features else "its nodes have no features"
                message = f'no node of {where} has the feature "{name}"; {known}{did_you_mean(name, features)}'
                yield "constraint", message

    def _nodes(self) -> tuple[NodeFacts, ...]:
        """Return the nodes of the partition, or of all partitions."""
        partition = [f"--partition={self.site.partition}"] if self.site.partition else []
        return parse_nodes(_slurm("sinfo", "--noheader", "--Node", "--format=%N|%c|%G|%f", *partition))

    def _partitions(self) -> tuple[Partition, ...]:
        """Return all partitions, or () if they are not known at the moment."""
        try:
            return parse_partitions(_slurm("scontrol", "show", "partition", "-o"))
        except EngineError:
            return ()

    def _chosen(self) -> tuple[Partition, ...]:
        """Return the partitions in which a job may run."""
        names = (self.site.partition or "").split(",")
        return tuple(
            partition
            for partition in self._partitions()
            if (partition.name in names if self.site.partition else partition.is_default)
        )

    def idle_nodes(self) -> Sequence[str]:
        partition = [f"--partition={self.site.partition}"] if self.site.partition else []
        printed = _slurm("sinfo", "--noheader", "--Node", "--responding", "--states=idle", "--format=%N", *partition)
        return [*dict.fromkeys(printed.split())]  # a node is listed once for each of its partitions

    def render(self, job: Job) -> Script:
        file = job.directory / "job.sbatch"
        endpoint = f"{job.site.rendezvous}:$((20000 + SLURM_JOB_ID % 20000))" if job.site.rendezvous else None
        meeting = [_RENDEZVOUS if endpoint is None else f'endpoint="{endpoint}"'] if job.torchrun else []
        srun = shlex.join(["srun", "--kill-on-bad-exit=0", *job.site.srun])
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {directive}" for directive in _directives(job, _longest_s(self._chosen()))),
            "# nsa-harness wrote this script. `sbatch` on this file repeats the run by hand.",
            "set -u",
            *job.site.setup_commands(),
            *job.exports(),
            *meeting,
            f"{srun} \\",
            f"  {job.node_command('$SLURM_JOB_ID', '$endpoint')}",
        ]
        return Script(file=file, text="\n".join(lines) + "\n", command=("sbatch", str(file)), name=job.name)

    def submit(self, script: Script, env: Mapping[str, str]) -> JobHandle:
        printed = _slurm("sbatch", "--parsable", str(script.file), env=env)
        job_id = parse_job_id(printed)
        if job_id is None:
            raise EngineError(f"sbatch printed no job id: {printed.strip()[:200]!r}")
        return self._handle(job_id, script)

    def _handle(self, job_id: str, script: Script) -> JobHandle:
        cluster = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        return JobHandle(engine=self.name, id=job_id, directory=str(script.file.parent), facts=cluster)

    def find(self, script: Script) -> JobHandle | None:
        printed = _slurm("squeue", "--noheader", "--me", f"--name={script.name}", "--format=%i")
        job_id = parse_job_id(printed)
        return None if job_id is None else self._handle(job_id, script)

    def poll(self, handle: JobHandle) -> JobStatus:
        try:
            shown = _slurm("scontrol", "show", "job", "-o", handle.id, env=_at(handle))
        except EngineError as error:
            if _UNKNOWN_JOB not in str(error):
                raise Unreachable(str(error)) from None
            shown = ""
        return parse_show_job(shown, handle.id) or self._accounted(handle)

    def _accounted(self, handle: JobHandle) -> JobStatus:
        """Return the state of a job that the controller has forgotten."""
        lost = JobStatus(state=JobState.LOST, reason=f"Slurm no longer knows job {handle.id}")
        try:
            columns = "--format=JobID,State,ExitCode,NodeList"
            printed = _slurm("sacct", "-X", "-P", "-n", f"--jobs={handle.id}", columns, env=_at(handle))
        except EngineError:
            return lost
        return parse_sacct(printed, handle.id) or lost

    def exec_on_nodes(self, handle: JobHandle, command: Sequence[str]) -> Iterator[NodeOutput]:
        # srun cannot separate what the nodes print, so each node writes to a file of its own.
        nodes = _slurm("squeue", "--noheader", f"--jobs={handle.id}", "--format=%D", env=_at(handle)).strip()
        step = ["srun", f"--jobid={handle.id}", "--overlap", f"--nodes={nodes}", "--ntasks-per-node=1"]
        with tempfile.TemporaryDirectory(prefix=".exec-", dir=handle.directory) as folder:
            wrapped = f'"$@" > "{folder}/$SLURMD_NODENAME" 2>&1; echo $? > "{folder}/$SLURMD_NODENAME.status"'
            _slurm(*step, "bash", "-c", wrapped, "bash", *command, env=_at(handle))
            for file in sorted(Path(folder).glob("*.status")):
                output = file.with_suffix("").read_text(errors="replace")
                yield NodeOutput(node=file.stem, text=output, status=int(file.read_text() or 1))

    def cancel_command(self, handle: JobHandle) -> str:
        return f"scancel {handle.id}"

    def cancel(self, handle: JobHandle) -> None:
        try:
            _slurm("scancel", handle.id, env=_at(handle))
        except EngineError as error:
            if _UNKNOWN_JOB not in str(error):
                raise


def _longest_s(partitions: Sequence[Partition]) -> float | None:
    """Return how long a job may run in one of the partitions, or None without a limit."""
    limits = [partition.max_time_s for partition in partitions]
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


def _directives(job: Job, longest_s: float | None) -> Iterator[str]:
    """Yield the options of sbatch. `longest_s`: how long a job may run in its partition."""
    site = job.site
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--output={shlex.quote(str(job.directory / OUTPUT))}"
    yield f"--chdir={shlex.quote(str(job.cwd))}"
    yield "--no-requeue"  # a repeated job is an attempt of its own, which nsa-harness submits
    yield "--open-mode=append"
    if site.partition:
        yield f"--partition={site.partition}"
    if site.account:
        yield f"--account={site.account}"
    if site.constraint:
        yield f"--constraint={site.constraint}"
    if job.only:
        yield f"--nodelist={','.join(job.only)}"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if site.cpus_per_node:
        yield f"--cpus-per-task={site.cpus_per_node}"
    if site.time_limit:
        yield f"--time={site.time_limit}"
    elif job.limit_s is not None:
        minutes = math.ceil((job.limit_s + _LIMIT_MARGIN_S) / 60)
        # With more time than the partition allows, the job would never start.
        yield f"--time={minutes if longest_s is None else min(minutes, max(1, int(longest_s // 60)))}"
    yield from site.directives


def _at(handle: JobHandle) -> dict[str, str]:
    """Return the environment in which the commands of Slurm find the cluster of a job."""
    return {**os.environ, **handle.facts}


def _slurm(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Return what a command of Slurm prints. Raise EngineError with its error message if it fails."""
    try:
        result = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except OSError as error:
        raise EngineError(f"{command[0]} could not be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not answer within {_TIMEOUT_S:g} s") from None
    if result.returncode:
        message = " ".join((result.stderr or result.stdout).split())
        message = message.removeprefix(f"{command[0]}: ").removeprefix("error: ")  # its own name is named here
        raise EngineError(f"{command[0]}: {message[:500] or f'exit status {result.returncode}'}")
    return result.stdout
