"""Looks at what training makes of its numbers: losses, parameters, missing gradients and memory, step by step.
At the end also which files were written.

A look reads host memory between two steps. It is taken after the first steps and then ever more rarely, at the same
steps on every rank. What is not in host memory is not looked at.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .. import protocol
from . import replicas
from .dropped_batches import GivenUp
from .fingerprint import Unreadable, all_zero, broken, sample, trained
from .gradients import GradientSamples
from .hooks import Fetches, compiling_test
from .names import ModuleNames
from .places import foreign_code, innermost, place_text
from .status_file import StatusFileWriter
from .trouble import TroubleLog
from .writes import WrittenFiles

EVERY_STEP_UNTIL = 16
LOOKS_AN_OCTAVE = 8
OPTIMIZERS_LIMIT = 8
SAMPLE_BYTES = 128 << 10  # of all parameters of an optimizer
FILE_LIMIT_BYTES = 1 << 20
NAMES_LIMIT = 8
USUAL_AFTER = 4  # steps: in the first ones much has no gradient yet


def install(
    torch: Any,
    board: StatusFileWriter,
    trouble: TroubleLog,
    directory: str,
    names: ModuleNames,
    given_up: GivenUp,
    fetches: Fetches,
) -> HealthSampler:
    """Each kind of look stands alone; what this torch does not have is noted and left out."""
    looks = HealthSampler(torch, board, trouble, directory, names, given_up, fetches)
    trouble.attempt("looks at optimizers", looks.hook_optimizers)
    trouble.attempt("looks at losses", looks.cover_backward)
    trouble.attempt("looks at replicas", lambda: replicas.watch(looks.made))
    trouble.attempt("looks at files", lambda: looks.written.watch(torch))
    atexit.register(looks.at_exit)
    return looks


def due(count: int) -> bool:
    """The first few, then eight an octave: 16, 18, .. 30, 32, 36, .. 60, 64, 72, .."""
    if count <= EVERY_STEP_UNTIL:
        return count > 0
    return not count & ((1 << (count.bit_length() - LOOKS_AN_OCTAVE.bit_length())) - 1)


class _Steps:
    """One optimizer: how often it stepped, what was broken before it ever did, and what never had a gradient, or one
    that was not zero."""

    def __init__(self) -> None:
        self.count = 0
        self.born_broken: frozenset[int] = frozenset()
        self.never: set[int] | None = None
        self.still = 0  # parameters whose gradients were all zero at every look; 0 once one was not


class HealthSampler:
    """The looks of one process. A forked child keeps the hooks and looks at nothing."""

    def __init__(
        self,
        torch: Any,
        board: StatusFileWriter,
        trouble: TroubleLog,
        directory: str,
        names: ModuleNames,
        given_up: GivenUp,
        fetches: Fetches,
    ) -> None:
        self._given_up, self._gradients, self._fetches = given_up, GradientSamples(names), fetches
        self._torch, self._board, self._trouble, self._names = torch, board, trouble, names
        self._path = os.path.join(directory, protocol.LOOKS.format(pid=os.getpid()))
        self._written = 0
        self._optimizers: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._replicas: list[replicas.LiveReplica] = []
        self._losses, self._bad_losses, self._bad_in_a_row = 0, 0, 0
        self._step = 1
        self._total_steps = 0
        self._round = self._round_key = 0
        self._foreign = foreign_code(torch)
        self.written = WrittenFiles(board, trouble, self._foreign)
        self._never_used: tuple[tuple[str, ...], str] = (), ""
        self._in_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)
        self.at_the_end: list[Callable[[], Iterable[dict[str, Any]]]] = [
            self.written.records,
            given_up.records,
            lambda: self._gradients.records(by_hand=not self._total_steps),
        ]  # what else to write

    # What calls in.

    def hook_optimizers(self) -> None:
        from torch.optim import optimizer as optimizers

        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._safely("looks at gradients", self._before_step)),
            optimizers.register_optimizer_step_post_hook(self._safely("looks at parameters", self._after_step)),
        ]

    def cover_backward(self) -> None:
        """Stand around torch.autograd.backward, which every loss goes through: about a microsecond each."""
        original = self._torch.autograd.backward
        is_compiling = compiling_test(self._torch)
        look = self._safely("looks at losses", self._at_backward)
        failed = self._safely("batches", self._given_up.failed)
        done = self._safely("batches", self._given_up.went_back)
        arrived = self._safely("looks at arrived gradients", self._at_arrived)

        def backward(tensors: Any, *arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return original(tensors, *arguments, **options)
            look(tensors)
            try:
                result = original(tensors, *arguments, **options)
            except Exception as error:
                failed(error)
                raise
            arrived()
            done()
            return result

        backward.__doc__ = original.__doc__
        backward.__wrapped__ = original  # type: ignore[attr-defined]
        self._torch.autograd.backward = backward

    def made(self, model: Any) -> None:
        if self._board.live and len(self._replicas) < replicas.INSTANCES_LIMIT:
            self._trouble.attempt("looks at replicas", lambda: self._know(model))

    def at_forward(self) -> None:
        """The first forward after a step, or after a model was made: replicas are due to be equal here."""
        self._names.at_next_forward = None
        self._trouble.attempt("looks at replicas", self._begun)

    def at_exit(self) -> None:
        if self._board.live:
            self._trouble.attempt("looks at exit", self._at_exit)

    # What is looked at.

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._total_steps and not self._optimizers:
            self._trouble.attempt("looks at replicas", self._meet)
        steps = self._optimizers.get(optimizer)
        if steps is None:
            if len(self._optimizers) >= OPTIMIZERS_LIMIT:
                return
            steps = self._optimizers[optimizer] = _Steps()
            steps.born_broken = frozenset(id(one) for one, _ in self._broken(trained(optimizer)))
        steps.count += 1
        if not due(steps.count):
            return
        if steps.never is None or steps.still:
            steps.still = all_zero([one.grad for one in trained(optimizer) if one.grad is not None])
        missing = {id(one) for one in trained(optimizer) if one.grad is None and one.numel()}
        steps.never = missing if steps.never is None else steps.never & missing

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        steps = self._optimizers.get(optimizer)
        if steps is None:
            return
        self._step = max(self._step, steps.count + 1)
        if due(steps.count) and self._in_backward() == -1:
            self._write(self._numbers(optimizer, steps))
        self._stepped()

    def _numbers(self, optimizer: Any, steps: _Steps) -> dict[str, Any]:
        wrong = [(one, what) for one, what in self._broken(trained(optimizer)) if id(one) not in steps.born_broken]
        never = self._never(optimizer, steps)
        return {
            "at": "step",
            "optimizer": list(self._optimizers).index(optimizer),
            "step": steps.count,
            "anon": _anonymous_bytes(),
            "gpu": self._gpu_bytes(),
            "broken": len(wrong),
            "names": [self._name(one) for one, _ in wrong[:NAMES_LIMIT]],
            "value": wrong[0][1] if wrong else "",
            "never": len(never),
            "never_names": never[:NAMES_LIMIT],
            "never_place": self._used_at(tuple(never)) if steps.count >= USUAL_AFTER else "",
            "still": steps.still,
            **self._fetches.record(),
            **self._lost(),
        }

    def _broken(self, parameters: list[Any]) -> list[tuple[Any, str]]:
        """The parameters with a number that is not finite, as far as it stands in the sample. Those of FSDP too."""
        limit = max(256, SAMPLE_BYTES // max(1, len(parameters)))
        found = []
        for parameter in parameters:
            local = getattr(parameter, "_local_tensor", parameter)
            try:
                what = broken(sample(local, limit), str(local.dtype))
            except Unreadable as error:
                self._trouble.note("looks at parameters", error)
                continue
            if what is not None:
                found.append((parameter, what))
        return found

    def _never(self, optimizer: Any, steps: _Steps) -> list[str]:
        """Parameters that had no gradient in any look, although the module they belong to was called."""
        if not steps.never:
            return []
        owners = self._owners()
        called = [owners.get(id(one)) for one in trained(optimizer) if id(one) in steps.never]
        return [name for one in called if one is not None for name, was_called in (one,) if was_called]

    def _used_at(self, never: tuple[str, ...]) -> str:
        """The line that uses them, looked up once for the same ones."""
        if never and self._never_used[0] != never:
            from .exception_hints import used_at  # loads dis

            found = used_at(self._names.models(), never, self._foreign)
            self._never_used = never, place_text(*found) if found else ""
        return self._never_used[1] if never else ""

    def _at_backward(self, tensors: Any) -> None:
        losses = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        wrong = next((what for loss in losses if (what := self._broken_loss(loss)) is not None), None)
        self._losses += 1
        replicas.forget_reduced()
        self._bad_losses += wrong is not None
        self._bad_in_a_row = self._bad_in_a_row + 1 if wrong else 0
        if wrong is not None and self._bad_losses == 1:
            held = [one for optimizer in list(self._optimizers) for one, _ in self._broken(trained(optimizer))]
            names = [self._name(one) for one in held[:NAMES_LIMIT]]
            place = _user_place(self._foreign)
            self._write({"at": "loss", "step": self._step, "value": wrong, "place": place, "held": names})

    def _at_arrived(self) -> None:
        """A pass inside another one leaves what is not all."""
        if due(self._losses) and self._in_backward() == -1:
            self._gradients.look(self._losses, self._given_up.models, self._owners)

    def _broken_loss(self, loss: Any) -> str | None:
        if type(loss) is not self._torch.Tensor or loss.numel() != 1 or loss.device.type != "cpu":
            return None
        return broken(sample(loss, 16), str(loss.dtype))

    def _know(self, model: Any, *, wrapped: bool = True) -> None:
        replica = replicas.LiveReplica(len(self._replicas), model, wrapped=wrapped)
        self._replicas.append(replica)
        self._write(replica.header())
        self._names.at_next_forward = self.at_forward

    def _meet(self) -> None:
        """Before anything has stepped: models outside of DDP may be replicas too, which only all ranks' looks show."""
        found = list(replicas.alone(self._names.models(), self._replicas))
        for model in found[: replicas.INSTANCES_LIMIT - len(self._replicas)]:
            self._know(model, wrapped=False)

    def _begun(self) -> None:
        for replica in self._living():
            if replica.begins:
                replica.begins = False
                self._write(self._look_at(replica, "begun"))

    def _stepped(self) -> None:
        """A round ends with the first step after a backward: a rank that steps twice is still in the same one."""
        self._total_steps += 1
        self._given_up.took_another()
        key = self._losses or self._total_steps
        self._round += key != self._round_key
        self._round_key = key
        if not due(self._round):
            return
        for replica in self._living():
            replica.begins = True
            self._names.at_next_forward = self.at_forward
            self._write(self._look_at(replica, "stepped"))

    def _living(self) -> list[replicas.LiveReplica]:
        """None inside a backward, where an optimizer may step for one parameter at a time."""
        return [one for one in self._replicas if one.model() is not None] if self._in_backward() == -1 else []

    def _look_at(self, replica: replicas.LiveReplica, at: str) -> dict[str, Any]:
        return {"at": at, "ddp": replica.number, "round": self._round, "steps": self._total_steps, **replica.look()}

    def _at_exit(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        open_group = bool(distributed and distributed.is_available() and distributed.is_initialized())
        self._write({"at": "exit", "step": self._step - 1, "open_group": open_group, **self._lost()})
        for replica in self._living():
            if not replica.wrapped:
                self._write(self._look_at(replica, "over"))
        for records in self.at_the_end:
            for record in records():
                self._write(record)

    def _lost(self) -> dict[str, int]:
        return {"losses": self._losses, "bad_losses": self._bad_losses, "bad_in_a_row": self._bad_in_a_row}

    def _gpu_bytes(self) -> int | None:
        """What the allocator has given out: counted on the host, the device is not asked."""
        cuda = self._torch.cuda
        return int(cuda.memory_allocated()) if cuda.is_initialized() else None

    # Names, and the file.

    def _name(self, parameter: Any) -> str:
        known = self._owners().get(id(parameter))
        return known[0] if known else f"a parameter of {tuple(parameter.shape)}"

    def _owners(self) -> dict[int, tuple[str, bool]]:
        """Parameter -> its name, and whether its module was called."""
        return {
            id(parameter): (f"{name}.{own}" if name else own, called)
            for name, module, called in self._names.known()
            for own, parameter in module._parameters.items()
            if parameter is not None
        }

    def _safely(self, piece: str, do: Callable[..., None]) -> Callable[..., None]:
        """A look that fails is noted and never taken again."""
        alive = [True]

        def look(*arguments: Any) -> None:
            if not alive[0] or not self._board.live:
                return
            try:
                do(*arguments)
            except Exception as error:
                alive[0] = False
                self._trouble.note(piece, error)

        return look

    def _write(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        if not self._board.live or self._written + len(line) > FILE_LIMIT_BYTES:
            return
        self._written += len(line)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _user_place(foreign: tuple[str, ...]) -> str:
    frame = innermost(sys._getframe(1), foreign)
    return "" if frame is None else place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _anonymous_bytes() -> int | None:
    """Resident memory without files and shared segments: a mapped dataset that is read grows and is no leak."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
