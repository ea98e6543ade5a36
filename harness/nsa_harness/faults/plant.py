"""Plants a fault in a running program, at a given rank, step and layer."""

from __future__ import annotations

import atexit
import functools
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from . import acts
from .spec import BACKWARD, BEFORE_FORWARD, COLLECTIVE, IN_LOADER, IN_MODEL, PERSISTENT, FaultSpec, every_layer

# The modules that call all_reduce to average the loss. This is the call that the fault skips; calls that average
# gradients are ignored.
CALLERS = ("__main__", "nsa_attention.train", "nsa_attention.world")
LOADER = "nsa_attention.data"


def plant(text: str) -> None:
    """Plant the fault that the JSON string describes, after torch was imported. Raise ValueError if it is invalid."""
    fault = PlantedFault(FaultSpec(text), sys.modules["torch"])
    fault.count_steps()
    if fault.spec.kind in COLLECTIVE:
        fault.patch_all_reduce()
    else:
        fault.watch_for_model()
    atexit.register(fault.warn_if_it_never_happened)


class PlantedFault:
    """A deliberate failure in this process. It happens once, or in every step from its step on if it is persistent."""

    def __init__(self, spec: FaultSpec, torch: Any) -> None:
        self.spec = spec
        self._torch = torch
        self._step = 1
        self._reductions = 0
        self._has_happened = False
        self._is_possible = False  # the model and the job meet the fault's conditions
        self._seen_modules: weakref.WeakSet[Any] = weakref.WeakSet()  # modules that were called, and their submodules
        self._hooked_layers: weakref.WeakSet[Any] = weakref.WeakSet()  # layers that have the fault's hooks
        self._leaked_tensors: list[Any] = []
        self._recomputed_layers: set[int] = set()  # layers that the current backward pass has recomputed so far
        self._backward_pass = -1  # torch's id of the current backward pass
        self._is_drawn = random.SystemRandom().random() < self.spec.when.chance
        self._pid = os.getpid()
        self._counting_optimizer: Callable[[], object] = lambda: None

    def count_steps(self) -> None:
        """Count the steps of the program's first optimizer."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def after_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
            if self._counting_optimizer() is None:
                self._counting_optimizer = weakref.ref(optimizer)
            if self._counting_optimizer() is optimizer:
                self._step += 1

        register_optimizer_step_post_hook(after_step)

    def patch_all_reduce(self) -> None:
        """Patch all_reduce to skip or delay one call that averages the loss."""
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        all_reduce = self._torch.distributed.all_reduce

        @functools.wraps(all_reduce)
        def perhaps_all_reduce(*arguments: Any, **options: Any) -> Any:
            if averages_the_loss(sys._getframe(1).f_globals) and self._is_skipped_reduction():
                self._has_happened = True
                if self.spec.heals_s is None:
                    return None
                acts.come_late(self.spec.heals_s)
            return all_reduce(*arguments, **options)

        # The probe has patched all_reduce earlier, so it does not see a skipped call.
        self._torch.distributed.all_reduce = perhaps_all_reduce
        c10d.all_reduce = perhaps_all_reduce  # type: ignore[attr-defined]

    def watch_for_model(self) -> None:
        """Find the model at its first forward pass, and install the fault's hooks in it.

        The model is the first called module that has the fault's layer. A wrapper of it that is called later is treated
        as the model again.
        """

        def inspect(module: Any, _arguments: Any) -> None:
            if module in self._seen_modules:
                return
            self._seen_modules.update(module.modules())
            layers = dict(every_layer(module))
            if self._is_faulty_model(layers):
                self._is_possible = self.spec.when.is_met_by_job(module, self._torch.distributed)
                self._install_hooks(module, layers)

        self._torch.nn.modules.module.register_module_forward_pre_hook(inspect)

    def _is_faulty_model(self, layers: dict[int, Any]) -> bool:
        """Return whether the model whose numbered layers are `layers` is the one in which the fault occurs."""
        return self.spec.layer in layers or (self.spec.layer < 0 and bool(layers))

    def _install_hooks(self, model: Any, layers: dict[int, Any]) -> None:
        if self.spec.kind in IN_LOADER:
            self._patch_loaders()
        elif self.spec.kind in IN_MODEL:
            model.register_forward_pre_hook(self._before_model)
            self._before_model(model, ())  # the new hook does not run in the current call
        elif self.spec.when.in_recomputation:
            for number, layer in layers.items():
                if self._is_new(layer):
                    layer.register_forward_pre_hook(functools.partial(self._before_layer, number))
        elif self._is_new(layer := layers[self.spec.layer]):
            layer.register_forward_pre_hook(self._before_forward)
            layer.register_forward_hook(self._after_forward)

    def _is_new(self, layer: Any) -> bool:
        is_known = layer in self._hooked_layers
        self._hooked_layers.add(layer)
        return not is_known

    def _before_model(self, model: Any, _arguments: Any) -> None:
        """Overwrite the model's parameters before its forward pass, if the fault is due."""
        if not self._is_due():
            return
        for name, parameter in model.named_parameters():
            if fnmatchcase(name, self.spec.parameters):
                self._has_happened = True
                with self._torch.no_grad():
                    parameter.fill_(self.spec.value)

    def _patch_loaders(self) -> None:
        """Let the fault, when it is due, delay the next batch. The loaders have already returned the first one."""
        for loader, name in _loaders():
            fetch = getattr(loader, name)
            if not hasattr(fetch, _PATCHED):
                setattr(loader, name, self._with_starvation(fetch))

    def _with_starvation(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fetch)
        def fetch_or_starve(*arguments: Any, **options: Any) -> Any:
            if self._is_due():
                self._has_happened = True
                acts.wait_for_a_feeder(self.spec.heals_s)
            return fetch(*arguments, **options)

        setattr(fetch_or_starve, _PATCHED, True)
        return fetch_or_starve

    def _before_layer(self, number: int, _module: Any, arguments: Any) -> None:
        """Trigger the fault, if due, before layer `number` is recomputed: a forward inside a backward pass."""
        task = self._torch._C._current_graph_task_id()
        if task < 0 or not self._is_due() or not self._is_long_enough(arguments):
            return
        if task != self._backward_pass:
            self._backward_pass, self._recomputed_layers = task, set()
        self._recomputed_layers.add(number)
        if self.spec.when.is_met_by_recomputation(self._recomputed_layers):
            self._has_happened = True
            self._act(f"step {self.spec.step}, layer {number}, {self.spec.rank_text}")

    def _is_long_enough(self, arguments: Any) -> bool:
        """Return whether a layer's input [..., tokens, features] has as many tokens as the fault needs."""
        tensor = _first_tensor(arguments, self._torch.Tensor)
        return not self.spec.when.seq_len or (tensor is not None and tensor.shape[-2] >= self.spec.when.seq_len)

    def warn_if_it_never_happened(self) -> None:
        """Print a warning at exit if the fault never occurred, because the run would seem to be a healthy one."""
        is_conditional = self.spec.when.is_conditional
        if os.getpid() == self._pid and self._is_our_rank() and not self._has_happened and not is_conditional:
            print(f"nsa-harness: the planted fault never happened: {self.spec}", file=sys.stderr, flush=True)

    def _is_our_rank(self) -> bool:
        if self.spec.rank is None:
            return True
        dist = self._torch.distributed
        if dist.is_initialized():
            return bool(dist.get_rank() == self.spec.rank)
        return os.environ.get("RANK", "0") == str(self.spec.rank)

    def _is_skipped_reduction(self) -> bool:
        """Count a call to all_reduce that averages the loss. Return whether to skip or delay that call."""
        self._reductions += 1
        return not self._has_happened and self._reductions == self.spec.step and self._is_our_rank()

    def _is_due(self) -> bool:
        """Return whether the fault must occur now."""
        is_persistent = self.spec.kind in PERSISTENT
        is_now = (
            self._step >= self.spec.step if is_persistent else not self._has_happened and self._step == self.spec.step
        )
        return self._is_drawn and self._is_possible and is_now and self._is_our_rank()

    def _before_forward(self, _module: Any, arguments: Any) -> None:
        """Trigger the fault, if it is due, before its layer's forward pass."""
        if self.spec.kind in BEFORE_FORWARD and self._is_due() and self._is_long_enough(arguments):
            self._has_happened = True
            self._act(f"step {self.spec.step}, layer {self.spec.layer}, {self.spec.rank_text}")

    def _act(self, where: str) -> None:
        """Perform the fault's action at `where`, such as blocking or raising an exception."""
        if self.spec.kind == "raise":
            acts.raise_an_error(where, self.spec.heals_s)
        else:
            _ACTS[self.spec.kind](self.spec.heals_s)

    def _after_forward(self, _module: Any, arguments: Any, output: Any) -> None:
        """Trigger the fault, if it is due, after its layer's forward pass or in its backward pass."""
        tensor = _first_tensor(output, self._torch.Tensor)
        if tensor is None or not self._is_due() or not self._is_long_enough(arguments):
            return
        if self.spec.kind == "slow_step":
            self._has_happened = True
            acts.crawl_token_by_token(self._torch, tensor, self.spec.heals_s)
        elif self.spec.kind in PERSISTENT:
            self._has_happened = True
            self._leaked_tensors.append(acts.a_copy_to_keep(self._torch, tensor))
        elif self.spec.kind in BACKWARD and tensor.grad_fn is not None:
            # A pre-hook of grad_fn runs where a Function.backward of the layer would run. A tensor hook runs earlier.
            tensor.grad_fn.register_prehook(self._in_backward)

    def _in_backward(self, _gradients: Any) -> None:
        """Trigger the fault in its layer's backward pass, but only once."""
        if self._has_happened:
            return
        self._has_happened = True
        self._act("in backward")


def _loaders() -> Iterator[tuple[Any, str]]:
    """Yield each loaded data loader class, and the name of its method that returns a batch."""
    for name, module in list(sys.modules.items()):
        if name == LOADER:
            yield module.Batches, "fetch"
    from torch.utils.data import dataloader

    yield dataloader._BaseDataLoaderIter, "__next__"


def _first_tensor(output: Any, tensor_type: type) -> Any:
    items = output if isinstance(output, (tuple, list)) else (output,)
    return next((item for item in items if isinstance(item, tensor_type)), None)


def averages_the_loss(caller: dict[str, Any]) -> bool:
    """Return whether the module that calls all_reduce, given its globals `caller`, uses it to average the loss."""
    return caller.get("__name__") in CALLERS


_PATCHED = "_nsa_harness_covered"
_ACTS = {
    "sigkill": acts.send_itself_sigkill,
    "sigstop": acts.send_itself_sigstop,
    "exit0": acts.leave_with_status_0,
    "slow_step": acts.come_late,
    "deadlock": acts.take_a_held_lock,
    "endless_loop": acts.spin_in_python,
}
