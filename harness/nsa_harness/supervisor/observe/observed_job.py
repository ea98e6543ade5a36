"""An observed job: a user's command as a child of this process, watched to its end.

The watch is the same as for a launched run. What differs is the policy: a proof is reported and may be taken back, and
the job runs on.
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
from nsa_harness.core.verdict.proof import Proof
from nsa_harness.errors import CommandNotStarted
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.launch.launcher import KEEPER, Guarded, boards_dir, probe_environment, this_process
from nsa_harness.supervisor.launch.reaper import OWNER, process_of
from nsa_harness.supervisor.launch.umask import program_umask
from nsa_harness.supervisor.launch.watchdog import start_guardian
from nsa_harness.supervisor.observe.observed_job_reaper import WatchedCommandReaper
from nsa_harness.supervisor.observe.ranks import WatchedRanks, is_python_command
from nsa_harness.supervisor.storage.record import write_spec
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.watch.watch import Watch, WatchListener, WatchPolicy

_ASKED_S = 60.0  # a job that ends badly so soon after a signal was ended by it; torchrun takes 30 s for its ranks


@dataclass(kw_only=True)
class ObservedJob:
    """One attempt of an observed job: from its ranks' start to their end, or to the ranks that take their place."""

    guest: WatchedCommand
    spec: RunSpec
    attempt: AttemptDir
    audience: WatchListener
    relay: SignalForwarder
    on_ending: Callable[[Ending], None]  # HANG proven, or its deadline passed, and the job is still there
    ends_it: bool  # --on-hang=kill

    def __post_init__(self) -> None:
        policy = WatchPolicy(
            find_ranks=self._find_ranks,
            over=self._over,
            overdue=self._overdue,
            proven=self._proven,
            decide=self._decide,
            observed=True,
        )
        self.watch = Watch(
            guarded=self.guest,
            spec=self.spec,
            attempt=self.attempt,
            audience=self.audience,
            interrupted=lambda: False,
            policy=policy,
        )

    def resolved_spec(self) -> RunSpec:
        """With as many ranks as were seen; written down, as the report is about it."""
        self.watch.spec = with_ranks(self.watch.spec, self.ranks.count)
        write_spec(self.attempt, self.watch.spec)
        return self.watch.spec

    def _find_ranks(self, **parts: Any) -> WatchedRanks:
        self.ranks = WatchedRanks(**parts)
        return self.ranks

    def _decide(self, now_s: float, limits: Limits) -> Ending | None:
        if self.watch.spec.ranks < self.ranks.count:
            self.resolved_spec()
        if self.ranks.restarted:
            return Ending.STALL if self.watch.standing else Ending.RESTARTED
        return self.watch.suspicion(now_s, limits)

    def _proven(self, proof: Proof) -> Ending | None:
        if self.ends_it:
            return Ending.STALL
        self.watch.standing = proof
        self._report(Ending.STALL)
        return None

    def _overdue(self) -> Ending | None:
        if self.ends_it:
            return Ending.DEADLINE
        self._report(Ending.DEADLINE)
        spec = self.watch.spec
        self.watch.spec = replace(spec, limits=replace(spec.limits, deadline_s=None))
        return None

    def _over(self) -> Ending:
        """The command has left. A proof that stands goes before what ended the job in the end."""
        if self.watch.standing:
            return Ending.STALL
        return Ending.INTERRUPTED if self._was_asked_to_end() else Ending.EXITED

    def _report(self, ending: Ending) -> None:
        """The report of this moment, made from what a report of the end would be made from."""
        self.watch.close(ending)
        self.guest.bring_boards(Path(self.attempt.boards))
        self.on_ending(ending)

    def _was_asked_to_end(self) -> bool:
        asked_ns = self.relay.asked_to_end_ns
        if asked_ns is None or not ended_as_asked(self.guest.child.wait(), asked_ns, time.monotonic_ns()):
            return False
        self.watch.write("asked_to_end", t_s=(asked_ns - self.guest.origin_ns) / 1e9)
        return True


def ended_as_asked(status: int, asked_ns: int, ended_ns: int) -> bool:
    """A bad end soon after somebody asked for one; a good end is the job's own, and a late one has another reason."""
    return status != 0 and ended_ns - asked_ns <= _ASKED_S * 1e9


HOOK_LIMIT_S = 60.0


@dataclass(kw_only=True)
class Hook:
    """One call of --on-hang=exec's command, beside the watch: outcome on its input, a limit, failure as a sentence.

    `failed` is called from another thread, at most once.
    """

    command: str
    document: Path  # what it reads
    failed: Callable[[str], None]
    limit_s: float = HOOK_LIMIT_S

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="on-hang", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it has ended, or met its limit."""
        self._thread.join()

    def _run(self) -> None:
        try:
            why = self._call()
        except OSError as error:
            why = str(error)
        if why:
            self.failed(why)

    def _call(self) -> str | None:
        """Why it failed. Its output goes to our stderr: stdout is the job's."""
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", self.command],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, str(self.document), os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
            ],
            setpgroup=0,
            setsigmask=(),  # ours are blocked, and a child would inherit that
        )
        descriptor = os.pidfd_open(pid)
        ended, _, _ = select.select([descriptor], [], [], self.limit_s)
        os.close(descriptor)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not ended:
            return f"ended by us after {self.limit_s:g} s"
        return None if status == 0 else f"exit code {status}" if status > 0 else f"ended by signal {-status}"


# The user's own command, with the probe, and otherwise as if the user had started it.

_NO_BOARDS = shutil.ignore_patterns("*.sock", OWNER)  # a rank's own ear cannot be copied
_READY_S = 10.0


@dataclass(kw_only=True)
class WatchedCommand(Guarded):
    """An observed job: our own child, so that nobody but us takes its status."""

    child: subprocess.Popen[bytes]

    def bring_boards(self, home: Path) -> None:
        """Copies of the boards as they are now."""
        with contextlib.suppress(shutil.Error, FileNotFoundError):  # a process may leave with its files meanwhile
            shutil.copytree(self.boards, home, ignore=_NO_BOARDS, dirs_exist_ok=True)

    def next_attempt(self, attempt: AttemptDir) -> None:
        """What the guardian writes from here on goes to this attempt."""
        words = {"keep": str(attempt.boards.resolve()), "journal": str(attempt.processes.resolve())}
        self.order = {**self.order, **words}
        self.watches = {pid: command for pid, command in self.watches.items() if command["do"] == "adopt"}
        self.tell(do="journal", **words)

    def leave(self) -> None:
        """Bring the boards home and let the guardian go; no process of the job is touched."""
        self._ended(_READY_S, do="leave")

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "exit":
            self.watches.pop(event["pid"], None)

    def _next_guardian(self) -> subprocess.Popen[bytes]:
        return start_guardian(self.order, WatchedCommandReaper.module)


def start_guest(command: Sequence[str], attempt: AttemptDir, probe: str, relay: SignalForwarder) -> WatchedCommand:
    """Start `command` in our place in the terminal. Raises CommandNotStarted, and has left nothing behind then."""
    tag = f"{attempt.path.parent.name}-{secrets.token_hex(4)}"
    boards = boards_dir(tag)
    order = {
        "argv": None,
        "tag": tag,
        "boards": str(boards),
        "keep": str(attempt.boards.resolve()),
        "journal": str(attempt.processes.resolve()),
        "reserve": str(attempt.ballast_file.resolve()),
        "controller": this_process(),
    }
    KEEPER.keep(boards)
    origin_ns = time.monotonic_ns()
    guardian = start_guardian(order, WatchedCommandReaper.module)
    # The guardian makes the boards' directory, and says so: the first process of the job must find it.
    assert guardian.stdout is not None
    guardian.stdout.readline()
    try:
        child = _start(command, _environment(command, tag, boards, probe), relay)
    except OSError as error:
        assert guardian.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            guardian.stdin.close()  # it has adopted nothing, so that the end of its input ends it
        guardian.wait(timeout=_READY_S)
        raise not_started(command[0], error) from None
    guest = WatchedCommand(
        guardian=guardian,
        origin_ns=origin_ns,
        boards=boards,
        tag=tag,
        order=order,
        probed=probe != protocol.PROBE_OFF,
        child=child,
    )
    guest.tell(do="adopt", pid=child.pid)
    return guest


def check_command(command: Sequence[str]) -> None:
    """Raises CommandNotStarted as a shell would: 127 where there is none, 126 where it cannot be executed."""
    if shutil.which(command[0]) is None:
        found = os.sep in command[0] and os.path.exists(command[0])
        raise not_started(command[0], PermissionError("it cannot be executed") if found else FileNotFoundError())


def not_started(name: str, error: OSError) -> CommandNotStarted:
    if isinstance(error, FileNotFoundError):
        return CommandNotStarted(f"{name}: command not found, nor the interpreter it names; nothing was started", 127)
    why = error.strerror or str(error)
    return CommandNotStarted(f"{name}: {why}; nothing was started; `chmod +x`, or name its interpreter", 126)


def _start(command: Sequence[str], environment: dict[str, str], relay: SignalForwarder) -> subprocess.Popen[bytes]:
    # No new session or group: it must stay in the foreground of the terminal. Open files are passed on as they are.
    return subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=relay.unblock, umask=program_umask())


def _environment(command: Sequence[str], tag: str, boards: Path, probe: str) -> dict[str, str]:
    ours = (protocol.ENV_PREFIX, "NSA_HARNESS_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # `python train.py`: one process that is rank 0, unless it starts ranks of its own; their boards will say so.
    trains_itself = is_python_command(command) and not starts_ranks(command)
    return {
        **inherited,
        **probe_environment(inherited.get("PYTHONPATH", ""), tag, boards, probe),
        **({protocol.ENV_SOLO: "1"} if trains_itself else {}),
    }


def shell_status(returncode: int) -> int:
    """As a shell says it: 128 and the signal's number for a command that a signal ended."""
    return returncode if returncode >= 0 else 128 + signal.Signals(-returncode)


FORWARDED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
    }
)
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_SI_KERNEL = 0x80


@dataclass(kw_only=True)
class SignalForwarder:
    """Passes signals on to an observed job, those that it has not got already, and remembers who asked it to end.

    The signals are blocked from its making on and taken one by one by a thread: only so the kernel says who sent one.
    A key on the terminal reaches the whole foreground group, the job included; `kill` reaches us alone.
    """

    before: set[signal.Signals | int] = field(default_factory=set)
    asked_to_end_ns: int | None = None  # the first time that somebody outside the job did

    def __post_init__(self) -> None:
        self.before = set(signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED))

    def unblock(self) -> None:
        """In the child, before its program begins."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)

    def follow(self, pid: int) -> None:
        """Pass on to `pid`, which is our child, as long as we live."""
        threading.Thread(target=self._run, args=(pid,), name="signals", daemon=True).start()

    def _run(self, pid: int) -> None:
        job = process_of(pid)
        while True:
            received = signal.sigwaitinfo(FORWARDED)
            if _from_the_job(received.si_pid, pid):
                continue
            if received.si_signo in _ENDING and self.asked_to_end_ns is None:
                self.asked_to_end_ns = time.monotonic_ns()
            if received.si_code != _SI_KERNEL and job is not None:
                job.send(received.si_signo)


def _from_the_job(sender: int, job: int) -> bool:
    """A job that signals its own group has reached itself."""
    return sender == job or (sender != 0 and any(stat.pid == sender for stat in procfs.descendants(job)))
