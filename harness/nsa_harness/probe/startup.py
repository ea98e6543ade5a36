"""Starts the instrumentation in each Python process, and installs all of it in ranks.

The bootstrap calls `start_probe` in every Python process of a run. In a process that is not a rank and never imports
torch, the probe only reads the environment.
"""

from __future__ import annotations

import os
import sys

from .. import protocol
from .patches import AWAITED, TroubleLog, after_import, before_first_call, compiling_test, hide_probe

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .exceptions import DroppedBatchCounter
    from .exit_hooks import ExitCalls, ExitEvidence
    from .health_samples import HealthSampler
    from .hooks import FetchTimes
    from .names import ModuleNames
    from .status_file import StatusFileWriter

# Programs that start ranks and are not ranks themselves, even if a cluster has set RANK in their environment.
AGENT_MODULES = ("torch.distributed.run", "torch.distributed.launch")
AGENT_COMMANDS = ("torchrun",)
# With this variable of torchrun, a rank connects to the store of torchrun's agent, and does not open a store itself.
AGENT_STORE_FLAG = "TORCHELASTIC_USE_AGENT_STORE"


def start_probe() -> None:
    """Start the instrumentation in this process, unless an environment variable switches it off."""
    directory = os.environ.get(protocol.ENV_PROBE_DIRECTORY)
    mode = os.environ.get(protocol.ENV_PROBE, protocol.PROBE_FULL)
    if not directory or (mode == protocol.PROBE_OFF and protocol.ENV_FAULT not in os.environ):
        return
    probe = ProcessProbe(directory, mode)
    if _owns_rank():
        if os.environ.get(AGENT_STORE_FLAG):
            os.environ.setdefault(protocol.ENV_AGENT_STORE, _store_address())
        probe.set_up_rank()
    if protocol.ENV_RECORD in os.environ and not _is_agent(_command()):
        probe.trouble.attempt("recording", lambda: _record(directory, probe.trouble))
    after_import(AWAITED, probe.on_torch_import, probe.trouble)


def _owns_rank() -> bool:
    """Return whether the environment variable RANK refers to this process.

    Data loader workers and tools that a rank starts inherit its environment. The first process that calls this function
    owns RANK; in all its descendants the result is False.
    """
    is_named = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not (is_named or protocol.ENV_SOLO in os.environ) or _is_agent(_command()):
        return False
    return os.environ.setdefault(protocol.ENV_OWNER, str(os.getpid())) == str(os.getpid())


def _command() -> list[str]:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            # A forked rank's command line ends in thousands of NULs, see `ProcessTitle` of the fork server.
            return [os.fsdecode(argument) for argument in file.read().rstrip(b"\0").split(b"\0")]
    except OSError:
        return list(getattr(sys, "orig_argv", ()))


def _is_agent(command: list[str]) -> bool:
    return any(argument in AGENT_MODULES or os.path.basename(argument) in AGENT_COMMANDS for argument in command[1:3])


class ProcessProbe:
    """The instrumentation of one process. Until the process is known to be a rank, it only waits for imports."""

    def __init__(self, directory: str, mode: str) -> None:
        self.trouble = TroubleLog(directory)
        self._directory = directory
        self._mode = mode
        self._is_rank = False
        self._status_file: StatusFileWriter | None = None
        self._exit_evidence: ExitEvidence | None = None
        self._exit_calls: ExitCalls | None = None
        self._sampler: HealthSampler | None = None
        self._pieces: dict[str, Callable[[], object]] = {}  # functions that each heartbeat calls, by name

    def set_up_rank(self) -> None:
        """Open the status file and install the exit hooks in this process, which has turned out to be a rank."""
        self._is_rank = True
        # Data loader workers and tools inherit RANK from a program that srun started; only this process is the rank.
        os.environ.setdefault(protocol.ENV_OWNER, str(os.getpid()))
        if self._mode == protocol.PROBE_OFF:
            return
        self.trouble.attempt("status file", self._open_status_file)
        if self._status_file is not None and self._mode == protocol.PROBE_FULL:
            status_file = self._status_file
            self.trouble.attempt("exit hooks", lambda: self._watch_exit(status_file))
            if hasattr(sys, "monitoring"):
                self.trouble.attempt("coverage", self._record_coverage)

    def on_torch_import(self) -> None:
        """Install the instrumentation if this process is a rank, or wait until it becomes one."""
        if self._is_rank:
            self._set_up()
        else:
            self.trouble.attempt("late init", self._wait_for_init)

    def _open_status_file(self) -> None:
        from .status_file import StatusFileWriter

        path = os.path.join(self._directory, protocol.STATUS_FILE.format(pid=os.getpid()))
        # A process that a rank spawned does not count yet: init_process_group will show which rank it is.
        is_first = os.environ.get(protocol.ENV_OWNER) == str(os.getpid())
        is_solo = "RANK" not in os.environ and protocol.ENV_SOLO in os.environ and is_first
        rank, world_size = (0, 1) if is_solo else (_number("RANK"), _number("WORLD_SIZE"))
        note = self.trouble.note
        status_file = StatusFileWriter(
            path, rank=rank, world_size=world_size, on_failure=lambda error: note("progress events", error)
        )
        status_file.write_event(status_file.event_code("start", os.path.basename(sys.executable or "python")))
        self._status_file = status_file

    def _watch_exit(self, status_file: StatusFileWriter) -> None:
        from .exit_hooks import ExitCalls, ExitEvidence, StopSignals

        evidence = self._exit_evidence = ExitEvidence(status_file, self._directory, self.trouble)
        evidence.install()
        self._exit_calls = ExitCalls(status_file, self.trouble, evidence)
        self.trouble.attempt("exit calls", self._exit_calls.install)
        self.trouble.attempt("stop signals", StopSignals(status_file, self.trouble).install)

    def _record_coverage(self) -> None:
        from .coverage import start_coverage

        start_coverage(self._directory, self.trouble)

    def _set_up(self) -> None:
        if self._status_file is not None:
            status_file = self._status_file
            status_file.write_event(status_file.event_code("imported", "torch.distributed"))
            self.trouble.attempt("tracebacks", lambda: hide_probe(self.trouble))
            self.trouble.attempt("hooks", lambda: self._set_hooks(status_file))
            self.trouble.attempt("autograd", lambda: self._watch_autograd(status_file))
            self.trouble.attempt("collectives", lambda: self._watch_collectives(status_file))
            if self._mode == protocol.PROBE_FULL and protocol.ENV_NO_VALUES not in os.environ:
                self.trouble.attempt("values", lambda: self._watch_values(status_file))
            self.trouble.attempt("heartbeat", lambda: self._start_heartbeat(status_file))
            if self._exit_calls is not None:
                self.trouble.attempt("shutdown", self._exit_calls.watch_shutdown)
            if self._mode == protocol.PROBE_FULL:
                self.trouble.attempt("worker server", self._start_server)
        self.trouble.attempt("debugging modes", self._switch_debugging)
        if protocol.ENV_FAULT in os.environ:
            self.trouble.attempt("fault", _plant_fault)

    def _switch_debugging(self) -> None:
        if protocol.ENV_ANOMALY in os.environ or protocol.ENV_CHECKPOINT_DEBUG in os.environ:
            from .autograd import switch_debugging_on

            switch_debugging_on(sys.modules["torch"], self.trouble)

    def _set_hooks(self, status_file: StatusFileWriter) -> None:
        from .exceptions import DroppedBatchCounter
        from .hooks import FetchTimes, install
        from .places import foreign_code

        torch: Any = sys.modules["torch"]
        dropped_batches, fetches = (
            DroppedBatchCounter(status_file, foreign_code(torch)),
            FetchTimes(foreign_code(torch)),
        )
        names = install(torch, status_file, self.trouble, dropped_batches, fetches)
        if self._exit_evidence is not None:
            self._exit_evidence.names = names
        if self._mode == protocol.PROBE_FULL:
            self.trouble.attempt(
                "health samples", lambda: self._start_sampling(status_file, names, dropped_batches, fetches)
            )

    def _start_sampling(
        self,
        status_file: StatusFileWriter,
        names: ModuleNames,
        dropped_batches: DroppedBatchCounter,
        fetches: FetchTimes,
    ) -> None:
        from .health_samples import HealthSampler

        torch = sys.modules["torch"]
        self._sampler = HealthSampler(
            torch, status_file, self.trouble, self._directory, names, dropped_batches, fetches
        )
        self._sampler.install()
        if protocol.ENV_GROWTH in os.environ:
            from .growth import Growth

            growth = Growth(torch, status_file, self.trouble)
            growth.watch()
            self._sampler.record_sources.append(growth.records)

    def _watch_autograd(self, status_file: StatusFileWriter) -> None:
        from .autograd import watch_checkpoints, watch_graph

        torch, attempt = sys.modules["torch"], self.trouble.attempt
        attempt("checkpoints", lambda: watch_checkpoints(torch, status_file, self.trouble))
        attempt("autograd nodes", lambda: watch_graph(torch, status_file, self.trouble))

    def _watch_collectives(self, status_file: StatusFileWriter) -> None:
        from . import collectives, groups, waits
        from .places import foreign_code

        torch, c10d = sys.modules["torch"], sys.modules["torch.distributed.distributed_c10d"]
        step_times = None if self._sampler is None else self._sampler.step_times
        ongoing = waits.Waits(status_file, foreign_code(torch), self.trouble, step_times)
        members = groups.Groups(c10d, status_file)
        self._pieces |= {"waits": ongoing.write_lasting, "groups": members.write}
        if self._sampler is not None:
            self._sampler.record_sources.append(ongoing.unwaited.records)
        attempt, place = self.trouble.attempt, groups.MeshCoordinates(status_file)
        collectives.install(torch, status_file, self.trouble, ongoing, members)
        attempt("store waits", lambda: waits.watch_stores(c10d, ongoing))
        attempt("store keys", lambda: waits.watch_keys(c10d, status_file, ongoing.foreign, self.trouble))
        attempt("handles", lambda: waits.watch_handles(c10d, ongoing, compiling_test(torch)))
        attempt("mesh", lambda: groups.watch_meshes(torch, place, self.trouble))

    def _watch_values(self, status_file: StatusFileWriter) -> None:
        from .frame_values import FrameValues

        torch, c10d = sys.modules["torch"], sys.modules["torch.distributed.distributed_c10d"]
        values = FrameValues(status_file, self._directory, self.trouble)
        self._pieces["values"] = values.answer
        if self._exit_evidence is not None:
            self._exit_evidence.values = values
        values.watch_departure(c10d, (torch.distributed,))

    def _start_heartbeat(self, status_file: StatusFileWriter) -> None:
        from .heartbeat import Heartbeat

        self.trouble.attempt("device progress", lambda: self._watch_device(status_file))
        heartbeat = Heartbeat(status_file, self._directory, self.trouble, self._pieces)
        if self._sampler is not None:
            self._sampler.record_sources.append(heartbeat.line_records)
        heartbeat.start()

    def _start_server(self) -> None:
        from .heartbeat import start_worker_server

        start_worker_server(sys.modules["torch"], self._directory)

    def _watch_device(self, status_file: StatusFileWriter) -> None:
        from .device import install

        events = install(sys.modules["torch"], status_file, self.trouble)
        if events is not None:
            self._pieces["device progress"] = events.poll

    def _wait_for_init(self) -> None:
        """Treat this process as a rank once it calls init_process_group, for launchers that set no RANK."""
        torch = sys.modules["torch"]
        if not hasattr(torch.distributed, "init_process_group"):
            return

        def first_init(arguments: Any, options: Any) -> None:
            self.trouble.attempt("store of its own", lambda: _use_own_store(arguments, options))
            self.set_up_rank()
            self._set_up()

        # The original is restored in both namespaces before the setup patches it as a collective.
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        before_first_call(c10d, "init_process_group", "late init", self.trouble, first_init, also=(torch.distributed,))


def _store_address(init_method: object = None) -> str:
    """Return host:port of the store that the ranks of this process's group use."""
    if isinstance(init_method, str) and init_method.startswith("tcp://"):
        return init_method.removeprefix("tcp://").partition("/")[0].partition("?")[0]
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _use_own_store(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Let the ranks that a program starts itself open their own store, although torchrun started the program.

    They inherit the variable that makes ranks of torchrun connect to the store of its agent. At another address, no
    process would open a store then, so all of them would wait for it.
    """
    init_method = arguments[1] if len(arguments) > 1 else options.get("init_method")
    agent = os.environ.get(protocol.ENV_AGENT_STORE)
    if agent is not None and _store_address(init_method) != agent:
        os.environ.pop(AGENT_STORE_FLAG, None)


def _record(directory: str, trouble: TroubleLog) -> None:
    """Start recording which statements this process executes."""
    import json

    if sys.version_info < (3, 11):  # noqa: UP036
        raise RuntimeError("recording statements needs Python 3.11 or later")
    from .recorder import Recorder, rank_from_environment

    wanted = json.loads(os.environ[protocol.ENV_RECORD])
    recorder = Recorder(directory, trouble, with_values=wanted.get("values") is not False)
    if wanted.get("experiment"):
        from .experiment import Experiment  # type: ignore[import-not-found,import-untyped,unused-ignore]

        recorder.experiment = Experiment(wanted["experiment"], directory, rank_from_environment()[0])
    if hasattr(sys, "monitoring"):
        from .recorder_monitoring import Monitor

        Monitor(recorder, vars(sys)["monitoring"]).start()
    else:
        from .recorder_tracing import Tracer

        Tracer(recorder).start()


def _plant_fault() -> None:
    from ..faults import plant

    plant.plant(os.environ[protocol.ENV_FAULT])


def _number(name: str) -> int:
    """Return the value of the environment variable `name` as an integer, or -1 if it is not an integer."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return -1
