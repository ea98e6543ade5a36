"""Samples indicators of healthy training, such as losses, parameters and memory use.

A sample reads host memory between two steps. Samples are taken after each of the first steps and then less and less
often, at the same steps on every rank. Tensors outside of host memory are not sampled.
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
from .exceptions import DroppedBatchCounter
from .fingerprint import Unreadable, all_zero, not_finite, sample_bytes, trained_parameters
from .gradients import GradientSamples, cut_of
from .hooks import FetchTimes
from .names import ModuleNames
from .patches import TroubleLog, compiling_test, patch
from .places import foreign_code, frame_place, innermost, innermost_own, place_text
from .status_file import StatusFileWriter
from .step_times import StepTimes

EVERY_STEP_UNTIL = 16
SAMPLES_PER_OCTAVE = 8
OPTIMIZERS_LIMIT = 8
SAMPLE_BYTES = 128 << 10  # per sample of all parameters of an optimizer
CALLS_LIMIT = 64  # modules that are called outside of DDP
FILE_LIMIT_BYTES = 1 << 20
NAMES_LIMIT = 8
STEADY_AFTER = 4  # steps in which a parameter may still lack a gradient; after them, the line at fault is searched


def is_sampled(count: int) -> bool:
    """Return whether training step `count` is sampled: the first 16, then eight steps per power of two."""
    if count <= EVERY_STEP_UNTIL:
        return count > 0
    return not count & ((1 << (count.bit_length() - SAMPLES_PER_OCTAVE.bit_length())) - 1)


class _Steps:
    """The findings in the sampled steps of one optimizer."""

    def __init__(self, *, is_first: bool) -> None:
        self.is_first = is_first  # the training steps are those of the program's first optimizer
        self.count = 0
        self.not_finite_before: frozenset[int] = frozenset()  # ids of parameters that were not finite before step 1
        self.missing_gradients: set[int] | None = None  # ids of parameters without a gradient in every sample
        self.zero_gradients = 0  # number of gradients if all were zero in every sample; 0 once a gradient was not zero


class HealthSampler:
    """A sampler of losses, gradients, parameters and memory during training, which is idle in forked children."""

    def __init__(
        self,
        torch: Any,
        status_file: StatusFileWriter,
        trouble: TroubleLog,
        directory: str,
        names: ModuleNames,
        dropped_batches: DroppedBatchCounter,
        fetches: FetchTimes,
    ) -> None:
        self._dropped_batches, self._gradients, self._fetches = dropped_batches, GradientSamples(names), fetches
        self._torch, self._status_file, self._trouble, self._names = torch, status_file, trouble, names
        self.step_times = StepTimes(torch, fetches)
        self._path = os.path.join(directory, protocol.HEALTH_SAMPLES.format(pid=os.getpid()))
        self._written_bytes = 0
        self._optimizers: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._replicas: list[replicas.LiveReplica] = []
        # id of a module that was called outside of DDP -> the line that called it, and the models in DDP that share its
        # parameters
        self._calls_past_ddp: dict[int, tuple[str, list[replicas.LiveReplica]]] = {}
        self._called_past_ddp: set[int] = set()  # ids of such modules that were called in this iteration
        self._losses, self._bad_losses, self._bad_in_a_row = 0, 0, 0
        self._step = 1
        self._total_steps = 0
        self._iteration = self._iteration_key = 0
        self._by_hand: list[tuple[replicas.LiveReplica, dict[str, Any]]] = []  # models before the first update
        self._is_by_hand = False  # the program updates its parameters without an optimizer of torch
        self._exchanges = 0  # optimizer steps after which the ranks exchanged data before the next forward
        self._collectives_before = (0, 0)  # number of collectives, and of their elements, at the last optimizer step
        self._elements_of_step = self._elements_before = 0  # in the collectives of this iteration, and before it
        self._foreign = foreign_code(torch)
        self._written_files = WrittenFiles(status_file, trouble, self._foreign)
        self._cached_use: tuple[tuple[str, ...], str] = (), ""
        self._in_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)
        self.record_sources: list[Callable[[], Iterable[dict[str, Any]]]] = [
            self._written_files.records,
            dropped_batches.records,
            lambda: self._gradients.records(by_hand=not self._total_steps),
        ]  # functions that return further records, called at exit

    def install(self) -> None:
        """Install the hooks that take the samples."""
        attempt = self._trouble.attempt
        attempt("optimizer samples", self._hook_optimizers)
        attempt("loss samples", self._watch_backward)
        attempt("step times", lambda: self.step_times.watch_buffers(self._torch, self._trouble))
        attempt("replica samples", lambda: replicas.watch(self._on_new_replica, self._trouble, self._foreign))
        attempt("overwritten files", lambda: self._written_files.watch(self._torch))
        atexit.register(self._at_process_exit)

    # The hooks.

    def _hook_optimizers(self) -> None:
        from torch.optim import optimizer as optimizers

        self._end_step = self._safely("step times", self.step_times.end_step)
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._safely("gradient samples", self._before_step)),
            optimizers.register_optimizer_step_post_hook(self._safely("parameter samples", self._after_step)),
        ]

    def _watch_backward(self) -> None:
        """Patch torch.autograd.backward so that each loss and its gradients are sampled."""
        before_pass = self._safely("loss samples", self._before_backward)
        note_failure = self._safely("dropped batches", self._dropped_batches.note_failure)
        note_success = self._safely("dropped batches", self._dropped_batches.note_success)
        sample_gradients = self._safely("gradient samples after backward", self._sample_gradients)
        begin_backward = self._safely("step times", self.step_times.begin_backward)
        end_backward = self._safely("step times", self.step_times.end_backward)

        def before(arguments: Any, options: Any) -> None:
            before_pass(arguments[0] if arguments else options.get("tensors"))
            begin_backward()

        def after(_state: object, _arguments: Any, _options: Any, _result: Any, error: BaseException | None) -> None:
            end_backward()
            if error is None:
                sample_gradients()
                note_success()
            elif isinstance(error, Exception):
                note_failure(error)

        patch(
            self._torch.autograd,
            "backward",
            "loss samples",
            self._trouble,
            before=before,
            after=after,
            unless=compiling_test(self._torch),
        )

    def _on_new_replica(self, model: Any) -> None:
        if self._status_file.is_writing and len(self._replicas) < replicas.INSTANCES_LIMIT:
            self._trouble.attempt("replica samples", lambda: self._add_replica(model))
            self._names.at_outermost = self._safely("calls past DDP", self._note_call_past_ddp)

    def _note_call_past_ddp(self, module: Any) -> None:
        """Record that the program calls `module`, and not the DDP model that it may be part of."""
        if id(module) not in self._calls_past_ddp and len(self._calls_past_ddp) < CALLS_LIMIT:
            ddps = [replica for replica in self._replicas if replicas.shares_parameters(module, replica)]
            place = replicas.calling_place(sys._getframe(1), ddps[0].model(), self._foreign) if ddps else ""
            self._calls_past_ddp[id(module)] = place, ddps
        self._called_past_ddp.add(id(module))

    def _note_bypasses(self) -> None:
        """Record for each model in DDP whether this iteration called the model itself, and never DDP."""
        for module in self._called_past_ddp:
            place, ddps = self._calls_past_ddp.get(module, ("", []))
            for replica in ddps:
                if id(replica.model()) not in self._names.called_ddps:
                    replica.bypass = replica.bypass or place
        self._called_past_ddp.clear()
        self._names.called_ddps.clear()

    def _at_forward(self) -> None:
        """Sample the model replicas before the first forward pass after an optimizer step."""
        self._names.at_next_forward = None
        self._trouble.attempt("replica samples", self._sample_before_step)

    def _at_process_exit(self) -> None:
        if self._status_file.is_writing:
            self._trouble.attempt("samples at exit", self._at_exit)

    # The samples.

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if self._replicas and is_sampled(self._iteration + 1):
            self._trouble.attempt("replica samples", lambda: self._find_unreduced(optimizer))
        steps = self._optimizers.get(optimizer)
        if steps is None and not self._is_by_hand:
            self._trouble.attempt("replica samples", lambda: self._find_replicas(optimizer))
        if steps is None:
            if len(self._optimizers) >= OPTIMIZERS_LIMIT:
                return
            steps = self._optimizers[optimizer] = _Steps(is_first=not self._optimizers)
            steps.not_finite_before = frozenset(
                id(parameter) for parameter, _ in self._not_finite(trained_parameters(optimizer))
            )
        steps.count += 1
        if not is_sampled(steps.count):
            return
        if steps.missing_gradients is None or steps.zero_gradients:
            steps.zero_gradients = all_zero(
                [each.grad for each in trained_parameters(optimizer) if each.grad is not None]
            )
        missing = {id(each) for each in trained_parameters(optimizer) if each.grad is None and each.numel()}
        steps.missing_gradients = missing if steps.missing_gradients is None else steps.missing_gradients & missing

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        steps = self._optimizers.get(optimizer)
        if steps is None:
            return
        if steps.is_first:
            self._end_step()
        self._step = max(self._step, steps.count + 1)
        if is_sampled(steps.count) and self._in_backward() == -1:
            self._write(self._step_record(optimizer, steps))
        self._end_iteration()

    def _step_record(self, optimizer: Any, steps: _Steps) -> dict[str, Any]:
        wrong = [
            pair
            for pair in self._not_finite(trained_parameters(optimizer))
            if id(pair[0]) not in steps.not_finite_before
        ]
        never = self._missing_gradient_names(optimizer, steps)
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
            "never_place": self._used_at(tuple(never)) if steps.count >= STEADY_AFTER else "",
            "cut": cut_of(steps.missing_gradients or set()) if never else "",
            "still": steps.zero_gradients,
            **self._fetches.record(),
            **(self.step_times.record() if steps.is_first else {}),
            **self._loss_counts(),
        }

    def _not_finite(self, parameters: list[Any]) -> list[tuple[Any, str]]:
        """Return each parameter that has a NaN or infinite value in the sample, with "nan" or "inf"."""
        limit = max(256, SAMPLE_BYTES // max(1, len(parameters)))
        bad_parameters = []
        for parameter in parameters:
            local = getattr(parameter, "_local_tensor", parameter)
            try:
                value = not_finite(sample_bytes(local, limit), str(local.dtype))
            except Unreadable as error:
                self._trouble.note("parameter samples", error)
                continue
            if value is not None:
                bad_parameters.append((parameter, value))
        return bad_parameters

    def _missing_gradient_names(self, optimizer: Any, steps: _Steps) -> list[str]:
        """Return the names of the parameters that were used but never received a gradient."""
        if not steps.missing_gradients:
            return []
        owners = self._owners()
        entries = [
            owners.get(id(parameter))
            for parameter in trained_parameters(optimizer)
            if id(parameter) in steps.missing_gradients
        ]
        return [entry[0] for entry in entries if entry is not None and entry[1]]

    def _used_at(self, names: tuple[str, ...]) -> str:
        """Return the line of the program that uses the parameters `names`, or "" if unknown."""
        if names and self._cached_use[0] != names:
            from .exception_hints import line_that_uses  # loads dis

            place = line_that_uses(self._names.models(), names, self._foreign)
            self._cached_use = names, place_text(*place) if place else ""
        return self._cached_use[1] if names else ""

    def _before_backward(self, tensors: Any) -> None:
        losses = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        wrong = next((value for loss in losses if (value := self._not_finite_loss(loss)) is not None), None)
        if not self._total_steps:
            self._trouble.attempt("replica samples", self._note_update_by_hand)
        self._losses += 1
        replicas.forget_reduced()
        self._bad_losses += wrong is not None
        self._bad_in_a_row = self._bad_in_a_row + 1 if wrong else 0
        if wrong is not None and self._bad_losses == 1:
            bad_parameters = [
                pair[0]
                for optimizer in list(self._optimizers)
                for pair in self._not_finite(trained_parameters(optimizer))
            ]
            names = [self._name(parameter) for parameter in bad_parameters[:NAMES_LIMIT]]
            place = frame_place(innermost(sys._getframe(), self._foreign))
            self._write({"at": "loss", "step": self._step, "value": wrong, "place": place, "held": names})

    def _sample_gradients(self) -> None:
        if is_sampled(self._losses) and self._in_backward() == -1:
            self._gradients.take(self._losses, self._dropped_batches.models, self._owners)

    def _not_finite_loss(self, loss: Any) -> str | None:
        if type(loss) is not self._torch.Tensor or loss.numel() != 1 or loss.device.type != "cpu":
            return None
        return not_finite(sample_bytes(loss, 16), str(loss.dtype))

    def _add_replica(
        self, model: Any, kind: str = "ddp", original: replicas.LiveReplica | None = None
    ) -> replicas.LiveReplica:
        replica = replicas.LiveReplica(len(self._replicas), model, kind, original)
        replica.earlier = original.earlier if original else (self._iteration, self._total_steps)
        self._replicas.append(replica)
        self._write(replica.header())
        self._names.at_next_forward = self._at_forward
        return replica

    def _find_replicas(self, optimizer: Any) -> None:
        """Add the models that are not wrapped in DDP to the sampled replicas, before the first step of an optimizer.

        After the first optimizer of the program, only models are added that the optimizer trains.
        """
        trained = {id(parameter) for parameter in trained_parameters(optimizer)} if self._total_steps else None
        for model in self._models_without_ddp():
            if trained is not None and trained.isdisjoint(id(parameter) for parameter in model.parameters()):
                continue
            replica = self._add_replica(model, "model")
            for part, kind in replicas.summed_and_left_out(replica):
                self._add_replica(part, kind, replica)

    def _models_without_ddp(self) -> list[Any]:
        models = list(replicas.models_without_ddp(self._names.models(), self._replicas))
        return models[: max(0, replicas.INSTANCES_LIMIT - len(self._replicas))]

    def _note_update_by_hand(self) -> None:
        """Sample the replicas before a backward pass if the program has updated them without an optimizer of torch.

        The first backward pass only stores what they are before any update. A pass without an update, such as that of
        a further micro-batch, is not the end of an iteration.
        """
        if not self._losses:
            new = [replicas.LiveReplica(0, model, "model") for model in self._models_without_ddp()]
            self._by_hand = [(each, each.header()) for each in (*self._living_replicas(), *new)]
        elif is_sampled(self._losses) and self._in_backward() == -1:
            if not self._is_by_hand:
                living = [(each, header) for each, header in self._by_hand if each.model() is not None]
                self._is_by_hand = any(each.sample()["sum"] != header["sum"] for each, header in living)
                if not self._is_by_hand:
                    return
                for each, header in living:
                    if each.kind == "model":
                        each.number = len(self._replicas)
                        self._replicas.append(each)
                        self._write({**header, "ddp": each.number, "reduced": each.header()["reduced"]})
                        for part, kind in replicas.summed_and_left_out(each):
                            self._add_replica(part, kind, each)
                self._trouble.attempt("copies of models", self._find_belongings)
            self._iteration = self._iteration_key = self._losses
            self._count_elements()
            for each in self._living_replicas():
                self._write(self._replica_sample(each, "stepped"))
        self._collectives_before = replicas.collectives()
        self._note_bypasses()

    def _find_unreduced(self, optimizer: Any) -> None:
        """Add the trained parameters that DDP does not average, although it averages the rest of their model."""
        trained, models = trained_parameters(optimizer), self._names.models()
        for parameters, kind, ddp in replicas.unreduced_parameters(trained, models, self._replicas):
            if len(self._replicas) < 2 * replicas.INSTANCES_LIMIT:
                self._add_replica(parameters, kind, ddp)

    def _find_belongings(self) -> None:
        """After the first step of a model, add its buffers and its copies to the sampled replicas."""
        models = [each for each in self._living_replicas() if each.original is each and not each.has_belongings]
        for model in models:
            model.has_belongings = True
        for thing, kind, original in list(replicas.belongings(models)):
            self._add_replica(thing, kind, original)

    def _sample_before_step(self) -> None:
        exchanged = self._note_exchange()
        for replica in self._living_replicas():
            if replica.needs_sample:
                replica.needs_sample = False
                self._write(self._replica_sample(replica, "begun"))
            if exchanged and replica.kind == "model":
                self._write({**self._replica_sample(replica, "exchanged"), **exchanged})

    def _note_exchange(self) -> dict[str, int]:
        """Return the facts of an exchange between the last optimizer step and this forward pass, or {} if not sampled.

        Ranks that make different numbers of steps in between, as in federated learning, make the same exchanges.
        """
        calls, elements = replicas.collectives()
        calls_before, elements_before = self._collectives_before
        self._exchanges += calls != calls_before
        if calls == calls_before or not is_sampled(self._exchanges):
            return {}
        return {"round": self._exchanges, "calls": calls, "elements": elements - elements_before}

    def _end_iteration(self) -> None:
        """Count an optimizer step, and request a sample of the model replicas if this iteration is sampled.

        Further optimizer steps without a backward pass belong to the same iteration.
        """
        self._total_steps += 1
        self._dropped_batches.note_next_batch()
        key = self._losses or self._total_steps
        if key != self._iteration_key:
            self._iteration += 1
            self._count_elements()
        self._iteration_key = key
        if any(replica.original is replica and not replica.has_belongings for replica in self._replicas):
            self._trouble.attempt("copies of models", self._find_belongings)
        self._note_bypasses()
        self._collectives_before = replicas.collectives()
        if any(replica.kind == "model" for replica in self._replicas):
            self._names.at_next_forward = self._at_forward
        for replica in self._living_replicas():
            if not is_sampled(self._iteration - replica.earlier[0]):
                continue
            replica.needs_sample = True
            self._names.at_next_forward = self._at_forward
            self._write(self._replica_sample(replica, "stepped"))

    def _count_elements(self) -> None:
        """Count the elements in the collectives since the iteration before ended."""
        _, elements = replicas.collectives()
        self._elements_of_step, self._elements_before = elements - self._elements_before, elements

    def _living_replicas(self) -> list[replicas.LiveReplica]:
        """Return the replicas whose model exists, but none in a backward pass, in which an optimizer may step."""
        if self._in_backward() != -1:
            return []
        return [replica for replica in self._replicas if replica.model() is not None]

    def _replica_sample(self, replica: replicas.LiveReplica, at: str) -> dict[str, Any]:
        iterations, steps = replica.earlier
        header = {"at": at, "ddp": replica.number, "round": self._iteration - iterations}
        header["steps"] = (self._total_steps or self._iteration) - steps
        facts = replicas.optimizer_facts(self._optimizers, replica) if replica.kind in ("ddp", "model") else {}
        if at == "stepped" and replica.kind == "model":
            facts["elements"] = self._elements_of_step
        if at == "stepped":
            facts |= {"bypass": replica.bypass} if replica.bypass else {}
            replica.bypass = ""
        return {**header, **facts, **replica.sample()}

    def _at_exit(self) -> None:
        dist = sys.modules.get("torch.distributed")
        open_group = bool(dist and dist.is_available() and dist.is_initialized())
        self._write({"at": "exit", "step": self._step - 1, "open_group": open_group, **self._loss_counts()})
        for replica in self._living_replicas():
            if replica.kind == "model":
                self._write(self._replica_sample(replica, "over"))
        for records in self.record_sources:
            for record in records():
                self._write(record)

    def _loss_counts(self) -> dict[str, int]:
        return {"losses": self._losses, "bad_losses": self._bad_losses, "bad_in_a_row": self._bad_in_a_row}

    def _gpu_bytes(self) -> int | None:
        """Return the GPU memory that torch has allocated, in bytes, or None if CUDA is not initialized."""
        cuda = self._torch.cuda
        return int(cuda.memory_allocated()) if cuda.is_initialized() else None

    # Names and the file.

    def _name(self, parameter: Any) -> str:
        entry = self._owners().get(id(parameter))
        return entry[0] if entry else f"a parameter of {tuple(parameter.shape)}"

    def _owners(self) -> dict[int, tuple[str, bool]]:
        """Map the id of each parameter to its name and to whether the program called its module."""
        return {
            id(parameter): (f"{name}.{own}" if name else own, was_called)
            for name, module, was_called in self._names.modules()
            for own, parameter in module._parameters.items()
            if parameter is not None
        }

    def _safely(self, piece: str, do: Callable[..., None]) -> Callable[..., None]:
        """Return `do` as a function that never raises. After its first error, which is recorded, it does nothing."""
        is_active = [True]

        def safely(*arguments: Any) -> None:
            if not is_active[0] or not self._status_file.is_writing:
                return
            try:
                do(*arguments)
            except Exception as error:
                is_active[0] = False
                self._trouble.note(piece, error)

        return safely

    def _write(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        if not self._status_file.is_writing or self._written_bytes + len(line) > FILE_LIMIT_BYTES:
            return
        self._written_bytes += len(line)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _anonymous_bytes() -> int | None:
    """Return the resident memory in bytes without mapped files, which grow while a dataset is read."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


# Files that the program overwrites. If several ranks write the same file, they destroy each other's data.

FILES_LIMIT = 64
SPECIAL_DIRECTORIES = ("/dev/", "/proc/", "/sys/")  # the paths below them are not regular files


class WrittenFiles:
    """A record of the files that the program overwrites and the lines that open them."""

    def __init__(self, status_file: StatusFileWriter, trouble: TroubleLog, foreign: tuple[str, ...]) -> None:
        self._status_file, self._trouble, self._foreign = status_file, trouble, foreign
        self._files: dict[str, tuple[str, int]] = {}  # path -> the line, and the step in progress

    def watch(self, torch: Any) -> None:
        """Record the files that the program overwrites. torch.save opens files in C++, so its writer is patched."""

        def audit_open(event: str, arguments: tuple[Any, ...]) -> None:
            # An exception in this hook would be raised in the program's call of `open`.
            if event == "open" and self._status_file.is_writing and arguments[2] & os.O_TRUNC:
                self._trouble.attempt("overwritten files", lambda: self._note_file(arguments[0]))

        def before_save(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if self._status_file.is_writing:
                self._note_file(arguments[0] if arguments else next(iter(options.values()), None))

        patch(torch.serialization, "_open_zipfile_writer", "overwritten files", self._trouble, before=before_save)
        sys.addaudithook(audit_open)

    def _note_file(self, name: Any) -> None:
        if not isinstance(name, (str, bytes, os.PathLike)) or len(self._files) >= FILES_LIMIT:
            return
        path = os.path.realpath(os.fsdecode(name))
        if path in self._files or path.startswith(SPECIAL_DIRECTORIES):
            return
        frame = innermost_own(sys._getframe(1), self._foreign)
        if frame is not None:
            self._files[path] = frame_place(frame), self._status_file.step

    def records(self) -> list[dict[str, Any]]:
        """Return a record for each overwritten file that exists and is not empty, and so is no lock file."""
        return [
            {"at": "wrote", "path": path, "place": place, "step": step}
            for path, (place, step) in self._files.items()
            if os.path.isfile(path) and os.path.getsize(path)
        ]
