"""Samples of training's health: losses, parameters, missing gradients and memory, and the files written, at exit.

A sample reads host memory between two steps. Samples are taken after each of the first steps and then ever more rarely,
at the same steps on every rank. Tensors outside of host memory are not sampled.
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
from .exceptions import DroppedBatches
from .fingerprint import Unreadable, all_zero, broken, sample, trained
from .gradients import GradientSamples
from .hooks import Fetches
from .names import ModuleNames
from .patches import TroubleLog, compiling_test, patch
from .places import foreign_code, frame_place, innermost, innermost_own, place_text
from .status_file import StatusFileWriter

EVERY_STEP_UNTIL = 16
SAMPLES_PER_OCTAVE = 8
OPTIMIZERS_LIMIT = 8
SAMPLE_BYTES = 128 << 10  # per sample of all parameters of an optimizer
FILE_LIMIT_BYTES = 1 << 20
NAMES_LIMIT = 8
USUAL_AFTER = 4  # steps: in the first steps many parameters have no gradient yet


def is_sampled(count: int) -> bool:
    """Whether step `count` is sampled: the first 16, then eight per octave: 18, .. 30, 32, 36, .. 60, 64, 72, .."""
    if count <= EVERY_STEP_UNTIL:
        return count > 0
    return not count & ((1 << (count.bit_length() - SAMPLES_PER_OCTAVE.bit_length())) - 1)


class _Steps:
    """The steps of one optimizer."""

    def __init__(self) -> None:
        self.count = 0
        self.born_broken: frozenset[int] = frozenset()  # parameters that were not finite before the first step
        self.never: set[int] | None = None  # parameters without a gradient in every sample
        self.still = 0  # parameters, if all gradients were zero in every sample; 0 once a gradient was not


class HealthSampler:
    """Takes the samples of one process. A forked child keeps the hooks and samples nothing."""

    def __init__(
        self,
        torch: Any,
        status_file: StatusFileWriter,
        trouble: TroubleLog,
        directory: str,
        names: ModuleNames,
        dropped_batches: DroppedBatches,
        fetches: Fetches,
    ) -> None:
        self._dropped_batches, self._gradients, self._fetches = dropped_batches, GradientSamples(names), fetches
        self._torch, self._status_file, self._trouble, self._names = torch, status_file, trouble, names
        self._path = os.path.join(directory, protocol.HEALTH_SAMPLES.format(pid=os.getpid()))
        self._written = 0
        self._optimizers: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._replicas: list[replicas.LiveReplica] = []
        self._losses, self._bad_losses, self._bad_in_a_row = 0, 0, 0
        self._step = 1
        self._total_steps = 0
        self._iteration = self._iteration_key = 0
        self._foreign = foreign_code(torch)
        self._written_files = WrittenFiles(status_file, trouble, self._foreign)
        self._never_used: tuple[tuple[str, ...], str] = (), ""
        self._in_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)
        self.at_the_end: list[Callable[[], Iterable[dict[str, Any]]]] = [
            self._written_files.records,
            dropped_batches.records,
            lambda: self._gradients.records(by_hand=not self._total_steps),
        ]  # further records for the end of the file

    def install(self) -> None:
        """Install the hooks. A kind of sample that this torch lacks is noted and skipped."""
        attempt = self._trouble.attempt
        attempt("looks at optimizers", self._hook_optimizers)
        attempt("looks at losses", self._watch_backward)
        attempt("looks at replicas", lambda: replicas.watch(self._replica_made, self._trouble))
        attempt("looks at files", lambda: self._written_files.watch(self._torch))
        atexit.register(self._at_process_exit)

    # The hooks.

    def _hook_optimizers(self) -> None:
        from torch.optim import optimizer as optimizers

        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._safely("looks at gradients", self._before_step)),
            optimizers.register_optimizer_step_post_hook(self._safely("looks at parameters", self._after_step)),
        ]

    def _watch_backward(self) -> None:
        """Patch torch.autograd.backward, through which every loss goes. Costs about a microsecond each."""
        began = self._safely("looks at losses", self._backward_began)
        failed = self._safely("batches", self._dropped_batches.pass_failed)
        done = self._safely("batches", self._dropped_batches.backward_done)
        arrived = self._safely("looks at arrived gradients", self._gradients_arrived)

        def after(_state: object, _arguments: Any, _options: Any, _result: Any, error: BaseException | None) -> None:
            if error is None:
                arrived()
                done()
            elif isinstance(error, Exception):
                failed(error)

        patch(
            self._torch.autograd,
            "backward",
            "looks at losses",
            self._trouble,
            before=lambda arguments, options: began(arguments[0] if arguments else options.get("tensors")),
            after=after,
            unless=compiling_test(self._torch),
        )

    def _replica_made(self, model: Any) -> None:
        if self._status_file.live and len(self._replicas) < replicas.INSTANCES_LIMIT:
            self._trouble.attempt("looks at replicas", lambda: self._add_replica(model))

    def _at_forward(self) -> None:
        """The first forward after a step, or after a model was made, where replicas are expected to be equal."""
        self._names.at_next_forward = None
        self._trouble.attempt("looks at replicas", self._step_begins)

    def _at_process_exit(self) -> None:
        if self._status_file.live:
            self._trouble.attempt("looks at exit", self._at_exit)

    # The samples.

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._total_steps and not self._optimizers:
            self._trouble.attempt("looks at replicas", self._find_replicas)
        steps = self._optimizers.get(optimizer)
        if steps is None:
            if len(self._optimizers) >= OPTIMIZERS_LIMIT:
                return
            steps = self._optimizers[optimizer] = _Steps()
            steps.born_broken = frozenset(id(parameter) for parameter, _ in self._broken(trained(optimizer)))
        steps.count += 1
        if not is_sampled(steps.count):
            return
        if steps.never is None or steps.still:
            steps.still = all_zero([each.grad for each in trained(optimizer) if each.grad is not None])
        missing = {id(each) for each in trained(optimizer) if each.grad is None and each.numel()}
        steps.never = missing if steps.never is None else steps.never & missing

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        steps = self._optimizers.get(optimizer)
        if steps is None:
            return
        self._step = max(self._step, steps.count + 1)
        if is_sampled(steps.count) and self._in_backward() == -1:
            self._write(self._numbers(optimizer, steps))
        self._stepped()

    def _numbers(self, optimizer: Any, steps: _Steps) -> dict[str, Any]:
        wrong = [pair for pair in self._broken(trained(optimizer)) if id(pair[0]) not in steps.born_broken]
        never = self._never(optimizer, steps)
        return {
            "at": "step",
            "optimizer": list(self._optimizers).index(optimizer),
            "step": steps.count,
            "anon": _anonymous_bytes(),
            "gpu": self._gpu_bytes(),
            "broken": len(wrong),
            "names": [self._name(parameter) for parameter, _ in wrong[:NAMES_LIMIT]],
            "value": wrong[0][1] if wrong else "",
            "never": len(never),
            "never_names": never[:NAMES_LIMIT],
            "never_place": self._used_at(tuple(never)) if steps.count >= USUAL_AFTER else "",
            "still": steps.still,
            **self._fetches.record(),
            **self._loss_counts(),
        }

    def _broken(self, parameters: list[Any]) -> list[tuple[Any, str]]:
        """Return the parameters with a sampled value that is not finite, each with "nan" or "inf"."""
        limit = max(256, SAMPLE_BYTES // max(1, len(parameters)))
        broken_ones = []
        for parameter in parameters:
            local = getattr(parameter, "_local_tensor", parameter)
            try:
                value = broken(sample(local, limit), str(local.dtype))
            except Unreadable as error:
                self._trouble.note("looks at parameters", error)
                continue
            if value is not None:
                broken_ones.append((parameter, value))
        return broken_ones

    def _never(self, optimizer: Any, steps: _Steps) -> list[str]:
        """Return the parameters without a gradient in any sample whose module was called."""
        if not steps.never:
            return []
        owners = self._owners()
        found = [owners.get(id(each)) for each in trained(optimizer) if id(each) in steps.never]
        return [owner[0] for owner in found if owner is not None and owner[1]]

    def _used_at(self, never: tuple[str, ...]) -> str:
        """Return the program's line that uses these parameters. It is looked up once."""
        if never and self._never_used[0] != never:
            from .exception_hints import used_at  # loads dis

            place = used_at(self._names.models(), never, self._foreign)
            self._never_used = never, place_text(*place) if place else ""
        return self._never_used[1] if never else ""

    def _backward_began(self, tensors: Any) -> None:
        losses = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        wrong = next((value for loss in losses if (value := self._broken_loss(loss)) is not None), None)
        self._losses += 1
        replicas.forget_reduced()
        self._bad_losses += wrong is not None
        self._bad_in_a_row = self._bad_in_a_row + 1 if wrong else 0
        if wrong is not None and self._bad_losses == 1:
            held = [pair[0] for optimizer in list(self._optimizers) for pair in self._broken(trained(optimizer))]
            names = [self._name(parameter) for parameter in held[:NAMES_LIMIT]]
            place = frame_place(innermost(sys._getframe(), self._foreign))
            self._write({"at": "loss", "step": self._step, "value": wrong, "place": place, "held": names})

    def _gradients_arrived(self) -> None:
        """Sample the gradients, unless this backward pass is inside another one, which is not done yet."""
        if is_sampled(self._losses) and self._in_backward() == -1:
            self._gradients.take(self._losses, self._dropped_batches.models, self._owners)

    def _broken_loss(self, loss: Any) -> str | None:
        if type(loss) is not self._torch.Tensor or loss.numel() != 1 or loss.device.type != "cpu":
            return None
        return broken(sample(loss, 16), str(loss.dtype))

    def _add_replica(self, model: Any, *, wrapped: bool = True) -> None:
        replica = replicas.LiveReplica(len(self._replicas), model, wrapped=wrapped)
        self._replicas.append(replica)
        self._write(replica.header())
        self._names.at_next_forward = self._at_forward

    def _find_replicas(self) -> None:
        """Add models without DDP before the first step: they may be replicas, which only all ranks' files show."""
        found = list(replicas.alone(self._names.models(), self._replicas))
        for model in found[: replicas.INSTANCES_LIMIT - len(self._replicas)]:
            self._add_replica(model, wrapped=False)

    def _step_begins(self) -> None:
        for replica in self._living():
            if replica.begins:
                replica.begins = False
                self._write(self._replica_sample(replica, "begun"))

    def _stepped(self) -> None:
        """An iteration ends with the first step after a backward pass: a second step belongs to the same iteration."""
        self._total_steps += 1
        self._dropped_batches.next_batch_began()
        key = self._losses or self._total_steps
        self._iteration += key != self._iteration_key
        self._iteration_key = key
        if not is_sampled(self._iteration):
            return
        for replica in self._living():
            replica.begins = True
            self._names.at_next_forward = self._at_forward
            self._write(self._replica_sample(replica, "stepped"))

    def _living(self) -> list[replicas.LiveReplica]:
        """Return the living replicas, or none inside a backward pass: an optimizer may step per parameter there."""
        if self._in_backward() != -1:
            return []
        return [replica for replica in self._replicas if replica.model() is not None]

    def _replica_sample(self, replica: replicas.LiveReplica, at: str) -> dict[str, Any]:
        known = {"at": at, "ddp": replica.number, "round": self._iteration, "steps": self._total_steps}
        return {**known, **replica.sample()}

    def _at_exit(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        open_group = bool(distributed and distributed.is_available() and distributed.is_initialized())
        self._write({"at": "exit", "step": self._step - 1, "open_group": open_group, **self._loss_counts()})
        for replica in self._living():
            if not replica.wrapped:
                self._write(self._replica_sample(replica, "over"))
        for records in self.at_the_end:
            for record in records():
                self._write(record)

    def _loss_counts(self) -> dict[str, int]:
        return {"losses": self._losses, "bad_losses": self._bad_losses, "bad_in_a_row": self._bad_in_a_row}

    def _gpu_bytes(self) -> int | None:
        """Return the bytes that torch's allocator counts on the host, without asking the device."""
        cuda = self._torch.cuda
        return int(cuda.memory_allocated()) if cuda.is_initialized() else None

    # Names and the file.

    def _name(self, parameter: Any) -> str:
        known = self._owners().get(id(parameter))
        return known[0] if known else f"a parameter of {tuple(parameter.shape)}"

    def _owners(self) -> dict[int, tuple[str, bool]]:
        """Return the parameters' names and whether their modules were called, by identity."""
        return {
            id(parameter): (f"{name}.{own}" if name else own, called)
            for name, module, called in self._names.known()
            for own, parameter in module._parameters.items()
            if parameter is not None
        }

    def _safely(self, piece: str, do: Callable[..., None]) -> Callable[..., None]:
        """Return `do` as a function that never raises. After its first exception, which is noted, it does nothing."""
        works = [True]

        def safely(*arguments: Any) -> None:
            if not works[0] or not self._status_file.live:
                return
            try:
                do(*arguments)
            except Exception as error:
                works[0] = False
                self._trouble.note(piece, error)

        return safely

    def _write(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        if not self._status_file.live or self._written + len(line) > FILE_LIMIT_BYTES:
            return
        self._written += len(line)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _anonymous_bytes() -> int | None:
    """Return resident memory without mapped files: a mapped dataset grows while it is read, and is no leak."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


# Files that the program overwrites: several ranks that write the same file destroy each other's data.

FILES_LIMIT = 64
NO_FILES = ("/dev/", "/proc/", "/sys/")


class WrittenFiles:
    """The files that the program truncated as it opened them, with its line. Costs one comparison per audit event."""

    def __init__(self, status_file: StatusFileWriter, trouble: TroubleLog, foreign: tuple[str, ...]) -> None:
        self._status_file, self._trouble, self._foreign = status_file, trouble, foreign
        self._files: dict[str, tuple[str, int]] = {}  # path -> the line, and the step in progress

    def watch(self, torch: Any) -> None:
        """Add an audit hook for Python's own `open`, and patch torch.save's, which opens files in C++."""

        def audited(event: str, arguments: tuple[Any, ...]) -> None:
            # An exception of this hook would be raised by the program's `open`.
            if event == "open" and self._status_file.live and arguments[2] & os.O_TRUNC:
                self._trouble.attempt("looks at files", lambda: self._opened(arguments[0]))

        def saved(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if self._status_file.live:
                self._opened(arguments[0] if arguments else next(iter(options.values()), None))

        patch(torch.serialization, "_open_zipfile_writer", "looks at files", self._trouble, before=saved)
        sys.addaudithook(audited)

    def _opened(self, name: Any) -> None:
        if not isinstance(name, (str, bytes, os.PathLike)) or len(self._files) >= FILES_LIMIT:
            return
        path = os.path.realpath(os.fsdecode(name))
        if path in self._files or path.startswith(NO_FILES):
            return
        frame = innermost_own(sys._getframe(1), self._foreign)
        if frame is not None:
            self._files[path] = frame_place(frame), self._status_file.step

    def records(self) -> list[dict[str, Any]]:
        """Return the files that exist at exit and are not empty: a lock file is empty, a renamed file is gone."""
        return [
            {"at": "wrote", "path": path, "place": place, "step": step}
            for path, (place, step) in self._files.items()
            if os.path.isfile(path) and os.path.getsize(path)
        ]
