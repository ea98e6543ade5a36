"""Who is a rank, and what is set up in it and when. The bootstrap calls `enter` in every Python process of a run."""

from __future__ import annotations

import os
import sys

from .. import protocol
from . import imports
from .trouble import TroubleLog

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .dropped_batches import GivenUp
    from .endings import Endings
    from .exit_hooks import Leaving
    from .health_samples import HealthSampler
    from .hooks import Fetches
    from .names import ModuleNames
    from .status_file import StatusFileWriter

# Programs that start ranks and are none, even where a cluster put RANK into their environment.
AGENT_MODULES = ("torch.distributed.run", "torch.distributed.launch")
AGENT_COMMANDS = ("torchrun",)


def enter() -> None:
    """Get ready, for the price of one look at the environment in a process that is no rank and never loads torch."""
    directory = os.environ.get(protocol.ENV_BOARDS)
    mode = os.environ.get(protocol.ENV_PROBE, protocol.PROBE_FULL)
    if not directory or (mode == protocol.PROBE_OFF and protocol.ENV_FAULT not in os.environ):
        return
    guest = ProcessProbe(directory, mode)
    if _rank_of_our_own():
        guest.become_rank()
    imports.after(imports.AWAITED, guest.torch_arrived, guest.trouble)


def _rank_of_our_own() -> bool:
    """RANK is ours unless an ancestor took it already: a rank's loader workers and tools inherit its environment."""
    named = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not (named or protocol.ENV_SOLO in os.environ) or _is_agent(_command()):
        return False
    return os.environ.setdefault(protocol.ENV_OWNER, str(os.getpid())) == str(os.getpid())


def _command() -> list[str]:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")]
    except OSError:
        return list(getattr(sys, "orig_argv", ()))


def _is_agent(command: list[str]) -> bool:
    return any(word in AGENT_MODULES or os.path.basename(word) in AGENT_COMMANDS for word in command[1:3])


class ProcessProbe:
    """The probe in one process: nothing but a listener until the process turns out to be a rank."""

    def __init__(self, directory: str, mode: str) -> None:
        self.trouble = TroubleLog(directory)
        self._directory = directory
        self._mode = mode
        self._is_rank = False
        self._board: StatusFileWriter | None = None
        self._endings: Endings | None = None
        self._leaving: Leaving | None = None
        self._looks: HealthSampler | None = None
        self._pieces: dict[str, Callable[[], object]] = {}  # what the beat does besides

    def become_rank(self) -> None:
        self._is_rank = True
        # A program that took RANK from elsewhere (srun) hands it on to its loader workers and tools as well.
        os.environ.setdefault(protocol.ENV_OWNER, str(os.getpid()))
        if self._mode == protocol.PROBE_OFF:
            return
        self.trouble.attempt("board", self._open_board)
        if self._board is not None and self._mode == protocol.PROBE_FULL:
            board = self._board
            self.trouble.attempt("endings", lambda: self._set_endings(board))

    def torch_arrived(self) -> None:
        if self._is_rank:
            self._set_up()
        else:
            self.trouble.attempt("late", self._wait_for_init)

    def _open_board(self) -> None:
        from .status_file import StatusFileWriter

        path = os.path.join(self._directory, protocol.BOARD.format(pid=os.getpid()))
        # Not a process that this one has spawned: init_process_group will say which rank that is.
        first = os.environ.get(protocol.ENV_OWNER) == str(os.getpid())
        alone = "RANK" not in os.environ and protocol.ENV_SOLO in os.environ and first
        rank, world_size = (0, 1) if alone else (_number("RANK"), _number("WORLD_SIZE"))
        failed = self.trouble.note
        board = StatusFileWriter(path, rank=rank, world_size=world_size, failed=lambda error: failed("marks", error))
        board.note(board.what("start", os.path.basename(sys.executable or "python")))
        self._board = board

    def _set_endings(self, board: StatusFileWriter) -> None:
        from .endings import Endings

        self._endings = Endings(board, self._directory, self.trouble)
        self._endings.install()
        endings = self._endings
        self.trouble.attempt("leaving", lambda: self._watch_leaving(board, endings))

    def _watch_leaving(self, board: StatusFileWriter, endings: Endings) -> None:
        from .exit_hooks import Leaving

        self._leaving = Leaving(board, self.trouble, endings)
        self._leaving.install()

    def _set_up(self) -> None:
        """Everything that needs torch. Each piece stands or falls alone."""
        if self._board is not None:
            board = self._board
            board.note(board.what("imported", "torch.distributed"))
            self.trouble.attempt("tracebacks", _hide)
            self.trouble.attempt("hooks", lambda: self._set_hooks(board))
            self.trouble.attempt("autograd", lambda: self._watch_autograd(board))
            self.trouble.attempt("collectives", lambda: self._set_collectives(board))
            self.trouble.attempt("beat", lambda: self._start_beat(board))
            if self._leaving is not None:
                self.trouble.attempt("end", self._leaving.watch_the_end)
            if self._mode == protocol.PROBE_FULL:
                self.trouble.attempt("worker server", self._start_server)
        self.trouble.attempt("debugging modes", self._switch_debugging)
        if protocol.ENV_FAULT in os.environ:
            self.trouble.attempt("fault", _plant_fault)

    def _switch_debugging(self) -> None:
        """What `--deepen` asks torch to tell; without it nothing is loaded."""
        if protocol.ENV_ANOMALY in os.environ or protocol.ENV_CHECKPOINT_DEBUG in os.environ:
            from .autograd import switch_debugging_on

            switch_debugging_on(sys.modules["torch"], self.trouble)

    def _set_hooks(self, board: StatusFileWriter) -> None:
        from .dropped_batches import GivenUp
        from .hooks import Fetches, install
        from .places import foreign_code

        torch: Any = sys.modules["torch"]
        given_up, fetches = GivenUp(board, foreign_code(torch)), Fetches(foreign_code(torch))
        names = install(torch, board, self.trouble, given_up, fetches)
        if self._endings is not None:
            self._endings.names = names
        if self._mode == protocol.PROBE_FULL:
            self.trouble.attempt("looks", lambda: self._set_looks(board, names, given_up, fetches))

    def _set_looks(self, board: StatusFileWriter, names: ModuleNames, given_up: GivenUp, fetches: Fetches) -> None:
        from .health_samples import install

        self._looks = install(sys.modules["torch"], board, self.trouble, self._directory, names, given_up, fetches)
        if protocol.ENV_GROWTH in os.environ:
            from .growth import Growth

            growth = Growth(sys.modules["torch"], board, self.trouble)
            growth.watch()
            self._looks.at_the_end.append(growth.records)

    def _watch_autograd(self, board: StatusFileWriter) -> None:
        from .autograd import watch_checkpoints, watch_graph

        torch, attempt = sys.modules["torch"], self.trouble.attempt
        attempt("checkpoints", lambda: watch_checkpoints(torch, board, self.trouble))
        attempt("autograd nodes", lambda: watch_graph(torch, board, self.trouble))

    def _set_collectives(self, board: StatusFileWriter) -> None:
        from . import collectives, groups, waits
        from .hooks import compiling_test
        from .places import foreign_code

        torch, c10d = sys.modules["torch"], sys.modules["torch.distributed.distributed_c10d"]
        lasting, members = waits.Waits(board, foreign_code(torch), self.trouble), groups.Groups(c10d, board)
        self._pieces |= {"waits": lasting.write_down, "groups": members.tell}
        if self._looks is not None:
            self._looks.at_the_end.append(lasting.unwaited.records)
        attempt, place = self.trouble.attempt, groups.MeshPlace(board)
        collectives.install(torch, board, self.trouble, lasting, members)
        attempt("store waits", lambda: waits.watch_stores(c10d, lasting))
        attempt("store keys", lambda: waits.watch_keys(c10d, board, lasting.foreign, self.trouble))
        attempt("handles", lambda: waits.watch_handles(c10d, lasting, compiling_test(torch)))
        attempt("mesh", lambda: groups.watch_meshes(torch, place, self.trouble))

    def _start_beat(self, board: StatusFileWriter) -> None:
        from .heartbeat import Heartbeat

        self.trouble.attempt("device marks", lambda: self._set_device_marks(board))
        Heartbeat(board, self._directory, self.trouble, self._pieces).start()

    def _start_server(self) -> None:
        from .server import start

        start(sys.modules["torch"], self._directory)

    def _set_device_marks(self, board: StatusFileWriter) -> None:
        from .device import install

        marks = install(sys.modules["torch"], board, self.trouble)
        if marks is not None:
            self._pieces["device marks"] = marks.poll

    def _wait_for_init(self) -> None:
        """A process without RANK that calls init_process_group is one all the same (srun, mp.spawn, accelerate)."""
        torch = sys.modules["torch"]
        if not hasattr(torch.distributed, "init_process_group"):
            return
        c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        original = torch.distributed.init_process_group

        def init_process_group(*arguments: Any, **options: Any) -> Any:
            if not self._is_rank:
                torch.distributed.init_process_group = original
                c10d.init_process_group = original
                self.become_rank()
                self._set_up()
            return c10d.init_process_group(*arguments, **options)

        init_process_group.__doc__ = original.__doc__
        init_process_group.__wrapped__ = original  # type: ignore[attr-defined]
        torch.distributed.init_process_group = init_process_group
        c10d.init_process_group = init_process_group


def _hide() -> None:
    from .endings import hide_probe

    hide_probe()


def _plant_fault() -> None:
    from ..faults import plant

    plant.plant(os.environ[protocol.ENV_FAULT])


def _number(name: str) -> int:
    """An integer of the environment; -1, which the board reads as unknown, if it is none."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return -1
