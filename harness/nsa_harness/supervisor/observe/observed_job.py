"""Runs a user's command as a child process and watches it, for the command `nsa-harness watch`.

The watch is the same as for a launched run, but with another policy. A proven hang is reported, and the job continues.
If the job makes progress again, the proof is retracted. What a job does while it is being ended is no progress.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Ending
from nsa_harness.core.plan import Limits, RunSpec
from nsa_harness.core.scenario.observed_job import starts_ranks, with_ranks
from nsa_harness.core.verdict.limits import is_exiting, last_progress_s
from nsa_harness.core.verdict.proof import Proof
from nsa_harness.errors import CommandNotStarted
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.launch.launcher import (
    WATCHDOG,
    LaunchedRun,
    note_probe_directory,
    probe_directory,
    probe_environment,
    this_process,
)
from nsa_harness.supervisor.launch.reaper import OWNER, process_identity
from nsa_harness.supervisor.launch.umask import program_umask
from nsa_harness.supervisor.launch.watchdog import start_reaper
from nsa_harness.supervisor.observe.observed_job_reaper import WatchedCommandReaper
from nsa_harness.supervisor.observe.ranks import WatchedRanks, is_python_command
from nsa_harness.supervisor.storage.record import write_spec
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.watch.watch import Watch, WatchListener, WatchPolicy

# A failure within this time after a signal counts as the effect of the signal. torchrun gives its ranks 30 s to exit.
_REQUEST_EFFECT_S = 60.0
# A proof is retracted once the job has run on for this long. A rank that is interrupted does not run on: it records a
# few events in its `finally` blocks, and then that it raised an exception.
_RUNS_ON_S = 2.0


@dataclass(kw_only=True)
class ObservedJob:
    """One attempt of an observed job, from the start of its ranks to their exit or restart."""

    command: WatchedCommand
    spec: RunSpec
    attempt: AttemptDir
    listener: WatchListener
    forwarder: SignalForwarder
    on_ending: Callable[[Ending], None]  # called when a HANG is proven or the deadline passes while the job continues
    ends_job: bool  # end the job if a HANG is proven or the deadline passes: --on-hang=kill
    proven_ranks: frozenset[int] = frozenset()  # ranks that were alive when the reported HANG was proven
    # After the reported proof: when the first progress was seen, and when it was made.
    resumed_s: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        policy = WatchPolicy(
            find_ranks=self._find_ranks,
            on_exit=self._on_exit,
            on_deadline=self._on_deadline,
            on_proof=self._on_proof,
            decide=self._decide,
            is_observed=True,
        )
        self.watch = Watch(
            job=self.command,
            spec=self.spec,
            attempt=self.attempt,
            listener=self.listener,
            is_interrupted=lambda: False,
            policy=policy,
        )

    def store_spec(self) -> RunSpec:
        """Store the job's spec, including the number of ranks that were found, and return it."""
        self.watch.spec = with_ranks(self.watch.spec, self.ranks.rank_count)
        write_spec(self.attempt, self.watch.spec)
        return self.watch.spec

    def _find_ranks(self, **parts: Any) -> WatchedRanks:
        self.ranks = WatchedRanks(**parts)
        return self.ranks

    def _decide(self, now_s: float, limits: Limits) -> Ending | None:
        if self.watch.spec.ranks < self.ranks.rank_count:
            self.store_spec()
        if self.ranks.has_restarted:
            return Ending.STALL if self.watch.reported_proof else Ending.RESTARTED
        if self.watch.reported_proof is not None:
            self._follow_reported_job(now_s)
            return None
        return None if self._ends_on_request() else self.watch.check_stall(now_s, limits)

    def _follow_reported_job(self, now_s: float) -> None:
        """Retract the reported proof once the job has run on for a while, unless it is being ended."""
        progress_s, since_s = self.ranks.last_progress_s(), self.watch.stalled_since_s
        if since_s is None or progress_s <= since_s or self._is_being_ended():
            return
        if self.resumed_s is None:
            self.resumed_s = now_s, progress_s
        elif now_s - self.resumed_s[0] >= _RUNS_ON_S:
            self._retract(self.resumed_s[1])

    def _retract(self, progress_s: float) -> None:
        self.watch.end_suspicion(progress_s)
        self.resumed_s = None

    def _is_being_ended(self) -> bool:
        """Return whether the hanging job is being ended by a signal, or because a rank has failed or exited."""
        living_ranks = self.ranks.living_pids.keys()
        files = (self.ranks.status_files.get(rank) for rank in living_ranks)
        ends = any(file is not None and (file.ended_by_exception or is_exiting(file)) for file in files)
        return self.forwarder.end_request_ns is not None or ends or not self.proven_ranks <= living_ranks

    def _ends_on_request(self) -> bool:
        """Return whether the job reacts to a signal that asks it to end. What it waits for from then on is no hang."""
        request_ns = self.forwarder.end_request_ns
        if request_ns is None:
            return False
        request_s = (request_ns - self.command.origin_ns) / 1e9
        return self.ranks.last_progress_s() > request_s or len(self.ranks.living_pids) < len(self.ranks.pids)

    def _on_proof(self, proof: Proof) -> Ending | None:
        if self.ends_job:
            return Ending.STALL
        self.watch.reported_proof, self.proven_ranks = proof, frozenset(self.ranks.living_pids)
        self._report(Ending.STALL)
        return None

    def _on_deadline(self) -> Ending | None:
        if self.ends_job:
            return Ending.DEADLINE
        self._report(Ending.DEADLINE)
        spec = self.watch.spec
        self.watch.spec = replace(spec, limits=replace(spec.limits, deadline_s=None))
        return None

    def _on_exit(self) -> Ending:
        """Return the reason why the watch ended, once the command has exited."""
        if self.watch.reported_proof is not None:
            resumed_s = self._resumed_before_exit_s()
            if resumed_s is None:
                return Ending.STALL
            self._retract(resumed_s)
        return Ending.INTERRUPTED if self._was_asked_to_end() else Ending.EXITED

    def _resumed_before_exit_s(self) -> float | None:
        """Return when the job with a proven HANG made progress again, if it then ended well by itself, or None."""
        files = [file for file in self.ranks.status_files.values() if file is not None]
        progress_s = self.resumed_s[1] if self.resumed_s else max(map(last_progress_s, files), default=0.0)
        ended_well = self.command.child.wait() == 0 and not any(file.ended_by_exception for file in files)
        since_s, request_ns = self.watch.stalled_since_s, self.forwarder.end_request_ns
        has_resumed = since_s is not None and progress_s > since_s
        return progress_s if has_resumed and ended_well and request_ns is None else None

    def _report(self, ending: Ending) -> None:
        """Write a report on the reason `ending`, while the job continues."""
        self.watch.close(ending)
        self.command.copy_probe_files(Path(self.attempt.probe_files))
        self.on_ending(ending)

    def _was_asked_to_end(self) -> bool:
        request_ns = self.forwarder.end_request_ns
        if request_ns is None or not failed_on_request(self.command.child.wait(), request_ns, time.monotonic_ns()):
            return False
        self.watch.write("asked_to_end", t_s=(request_ns - self.command.origin_ns) / 1e9)
        return True


def failed_on_request(status: int, request_ns: int, ended_ns: int) -> bool:
    """Return whether the job failed at `ended_ns` because a signal at `request_ns` asked it to end."""
    return status != 0 and ended_ns - request_ns <= _REQUEST_EFFECT_S * 1e9


HOOK_LIMIT_S = 60.0


@dataclass(kw_only=True)
class Hook:
    """One execution, in a thread with a time limit, of the user's command from --on-hang=exec."""

    command: str
    document: Path  # file with the outcome, which becomes the command's standard input
    on_failure: Callable[[str], None]  # called in the thread with the reason if the command fails
    limit_s: float = HOOK_LIMIT_S
    stop: int | None = None  # a file descriptor; when it becomes readable, the command is killed

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="on-hang", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the command has ended or has been killed at its time limit."""
        self._thread.join()

    def _run(self) -> None:
        try:
            failure = self.call()
        except OSError as error:
            failure = str(error)
        if failure:
            self.on_failure(failure)

    def call(self) -> str | None:
        """Run the command. Return the reason why it failed, or None if it succeeded."""
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", self.command],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, str(self.document), os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)],
            setpgroup=0,
            setsigmask=(),  # otherwise the command would inherit the blocked signals of this process
        )
        descriptor = os.pidfd_open(pid)
        stop = [] if self.stop is None else [self.stop]
        has_ended = descriptor in select.select([descriptor, *stop], [], [], self.limit_s)[0]
        os.close(descriptor)
        if not has_ended:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not has_ended:
            return f"killed by nsa-harness after {self.limit_s:g} s"
        return None if status == 0 else f"exit code {status}" if status > 0 else f"ended by signal {-status}"


# The user's command. It is started as the user would start it, but with the probe.

_IGNORED_FILES = shutil.ignore_patterns("*.sock", "*.new", OWNER)  # a socket cannot be copied, *.new is incomplete
_READY_S = 10.0


@dataclass(kw_only=True)
class WatchedCommand(LaunchedRun):
    """The observed command, started as a child of this process, which alone can reap its exit status."""

    child: subprocess.Popen[bytes]

    def copy_probe_files(self, home: Path) -> None:
        """Copy the current state of the instrumentation's files to the directory `home`."""
        # A process may exit and remove its files while they are copied.
        with contextlib.suppress(shutil.Error, FileNotFoundError):
            shutil.copytree(self.probe_dir, home, ignore=_IGNORED_FILES, dirs_exist_ok=True)

    def next_attempt(self, attempt: AttemptDir) -> None:
        """Make the reaper write to the files of `attempt`, the job's new attempt."""
        paths = {"keep": str(attempt.probe_files.resolve()), "journal": str(attempt.processes.resolve())}
        self.order = {**self.order, **paths}
        self.watch_commands = {pid: command for pid, command in self.watch_commands.items() if command["do"] == "adopt"}
        self.send_command(do="journal", **paths)

    def release(self) -> None:
        """Let the reaper store the status files and exit, while the job continues."""
        self._finish(_READY_S, do="leave")

    def _receive(self, event: dict[str, Any]) -> None:
        if event["event"] == "exit":
            self.watch_commands.pop(event["pid"], None)

    def _next_reaper(self) -> subprocess.Popen[bytes]:
        return start_reaper(self.order, WatchedCommandReaper.module)


def start_watched_command(
    command: Sequence[str], attempt: AttemptDir, probe: str, forwarder: SignalForwarder
) -> WatchedCommand:
    """Start `command` in the terminal's foreground. Raise CommandNotStarted, leaving nothing behind, if that fails."""
    tag = f"{attempt.directory.root.name}-{secrets.token_hex(4)}"
    probe_dir = probe_directory(tag)
    order = {
        "argv": None,
        "tag": tag,
        "boards": str(probe_dir),
        "keep": str(attempt.probe_files.resolve()),
        "journal": str(attempt.processes.resolve()),
        "reserve": str(attempt.ballast_file.resolve()),
        "controller": this_process(),
        "keeper": WATCHDOG.guard(probe_dir),
    }
    origin_ns = time.monotonic_ns()
    reaper = start_reaper(order, WatchedCommandReaper.module)
    # Wait until the reaper has created the probe directory, because the job's first process needs it.
    assert reaper.stdout is not None
    reaper.stdout.readline()
    try:
        child = _start(command, _environment(command, tag, probe_dir, probe, attempt), forwarder)
    except OSError as error:
        assert reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            reaper.stdin.close()  # the reaper has not adopted a job, so it exits at the end of its input
        reaper.wait(timeout=_READY_S)
        raise not_started(command[0], error) from None
    watched_command = WatchedCommand(
        reaper=reaper,
        origin_ns=origin_ns,
        probe_dir=probe_dir,
        tag=tag,
        order=order,
        has_probe=probe != protocol.PROBE_OFF,
        child=child,
    )
    watched_command.send_command(do="adopt", pid=child.pid)
    note_probe_directory(attempt, probe_dir)
    return watched_command


def check_command(command: Sequence[str]) -> None:
    """Raise CommandNotStarted, with a shell's exit code 127 or 126, if the command cannot be started."""
    if shutil.which(command[0]) is None:
        exists = os.sep in command[0] and os.path.exists(command[0])
        raise not_started(command[0], PermissionError("it is not executable") if exists else FileNotFoundError())


def not_started(name: str, error: OSError) -> CommandNotStarted:
    if isinstance(error, FileNotFoundError):
        return CommandNotStarted(f"{name}: command not found (or its interpreter is missing); nothing was started", 127)
    reason = error.strerror or str(error)
    return CommandNotStarted(
        f"{name}: {reason}; nothing was started; run `chmod +x` on it, or name its interpreter", 126
    )


def _start(command: Sequence[str], environment: dict[str, str], forwarder: SignalForwarder) -> subprocess.Popen[bytes]:
    # The command gets no new session or process group, because it must stay in the terminal's foreground. It inherits
    # all open files.
    return subprocess.Popen(
        command, env=environment, close_fds=False, preexec_fn=forwarder.unblock, umask=program_umask()
    )


def _environment(command: Sequence[str], tag: str, probe_dir: Path, probe: str, attempt: AttemptDir) -> dict[str, str]:
    harness_prefixes = (protocol.ENV_PREFIX, "NSA_HARNESS_")
    inherited_variables = {name: value for name, value in os.environ.items() if not name.startswith(harness_prefixes)}
    # `python train.py` is a single process and counts as rank 0. If it starts ranks, their status files will show that.
    is_single_rank = is_python_command(command) and not starts_ranks(command)
    return {
        **inherited_variables,
        **probe_environment(
            inherited_variables.get("PYTHONPATH", ""), tag, probe_dir, probe, reads_values=attempt.reads_values
        ),
        **({protocol.ENV_SOLO: "1"} if is_single_rank else {}),
    }


def shell_status(returncode: int) -> int:
    """Return the exit status that a shell would show for Popen's `returncode`, such as 137 for -9."""
    return returncode if returncode >= 0 else 128 + signal.Signals(-returncode)


FORWARDED = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH}
)
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_SI_KERNEL = 0x80


@dataclass(kw_only=True)
class SignalForwarder:
    """Forwards signals to an observed job, unless the job has already received them.

    The signals are blocked when this object is created, and a thread receives them, because only then does the kernel
    report the sender. A key on the terminal, such as Ctrl-C, sends a signal to the whole foreground process group,
    which includes the job. `kill` sends a signal only to this process.
    """

    original_mask: set[signal.Signals | int] = field(default_factory=set)
    end_request_ns: int | None = None  # time of the first signal from outside the job that asks it to end

    def __post_init__(self) -> None:
        self.original_mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED))

    def unblock(self) -> None:
        """Restore the original signal mask in the child process, before its program starts."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.original_mask)

    def follow(self, pid: int) -> None:
        """Forward signals to the child process `pid` until it ends."""
        threading.Thread(target=self._run, args=(pid,), name="signals", daemon=True).start()

    def _run(self, pid: int) -> None:
        job = process_identity(pid)
        while True:
            signal_info = signal.sigwaitinfo(FORWARDED)
            if _is_from_job(signal_info.si_pid, pid):
                continue
            if signal_info.si_signo in _ENDING and self.end_request_ns is None:
                self.end_request_ns = time.monotonic_ns()
            if signal_info.si_code != _SI_KERNEL and job is not None:
                job.send_signal(signal_info.si_signo)


def _is_from_job(sender: int, job: int) -> bool:
    """Return whether a signal came from the job itself, which therefore has received it as well."""
    return sender == job or (sender != 0 and any(stat.pid == sender for stat in procfs.descendants(job)))
