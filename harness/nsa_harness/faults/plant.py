"""Plants a fault in a running program: decides at which rank, step and module it happens, in any model."""

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
from .spec import AT_ONCE, BACKWARD, COLLECTIVE, LASTING, OF_THE_LOADER, OF_THE_MODEL, FaultSpec, every_layer

# The modules that call all_reduce to average the loss, which is the call to skip. Averaging gradients does not count.
CALLERS = ("__main__", "nsa_attention.train", "nsa_attention.world")
LOADER = "nsa_attention.data"


def plant(text: str) -> None:
    """Plant the fault that the JSON `text` describes in this process. Raise ValueError if the text is wrong.

    Call this function after torch has been imported.
    """
    fault = PlantedFault(FaultSpec(text), sys.modules["torch"])
    fault.count_steps()
    if fault.spec.kind in COLLECTIVE:
        fault.patch_all_reduce()
    else:
        fault.watch_for_model()
    atexit.register(fault.warn_if_it_never_happened)


class PlantedFault:
    """A fault planted in this process. It happens once; a lasting fault, such as a leak, happens in every step from its
    step on.
    """

    def __init__(self, spec: FaultSpec, torch: Any) -> None:
        self.spec = spec
        self._torch = torch
        self._step = 1
        self._reductions = 0
        self._happened = False
        self._possible = False  # the model and the job meet the fault's conditions
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # called modules with all their submodules
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()  # layers that have the fault's hooks
        self._leaked: list[Any] = []
        self._recomputed: set[int] = set()  # layers that the backward pass in progress has recomputed
        self._backward_pass = -1  # torch's id of that backward pass
        self._is_drawn = random.SystemRandom().random() < self.spec.when.chance
        self._pid = os.getpid()
        self._counting: Callable[[], object] = lambda: None

    def count_steps(self) -> None:
        """Register a hook that counts the steps of the first optimizer that steps. Steps of other optimizers are
        ignored.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def after_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
            if self._counting() is None:
                self._counting = weakref.ref(optimizer)
            if self._counting() is optimizer:
                self._step += 1

        register_optimizer_step_post_hook(after_step)

    def patch_all_reduce(self) -> None:
        """Patch all_reduce to skip or delay one call that averages the loss.

        The patch is outside of the probe's patch, so the probe does not see a skipped call.
        """
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        all_reduce = self._torch.distributed.all_reduce

        @functools.wraps(all_reduce)
        def perhaps_all_reduce(*arguments: Any, **options: Any) -> Any:
            if averages_the_loss(sys._getframe(1).f_globals) and self._is_the_reduction():
                self._happened = True
                if self.spec.heals_s is None:
                    return None
                acts.come_late(self.spec.heals_s)
            return all_reduce(*arguments, **options)

        self._torch.distributed.all_reduce = perhaps_all_reduce
        c10d.all_reduce = perhaps_all_reduce  # type: ignore[attr-defined]

    def watch_for_model(self) -> None:
        """Register a forward hook that finds the model and installs the fault's hooks in it.

        The model is the first called module that has the fault's layer. A wrapper of it that is called later is treated
        as the model again.
        """

        def inspect(module: Any, _arguments: Any) -> None:
            if module in self._seen:
                return
            self._seen.update(module.modules())
            layers = dict(every_layer(module))
            if self._is_the_model(layers):
                self._possible = self.spec.when.met_in(module, self._torch.distributed)
                self._install_hooks(module, layers)

        self._torch.nn.modules.module.register_module_forward_pre_hook(inspect)

    def _is_the_model(self, layers: dict[int, Any]) -> bool:
        """Whether a module with these layers is the model: it has the fault's layer, or any layer if the fault names
        none.
        """
        return self.spec.layer in layers or (self.spec.layer < 0 and bool(layers))

    def _install_hooks(self, model: Any, layers: dict[int, Any]) -> None:
        """Install the hooks that the fault needs in the model and its `layers`. A layer gets each hook only once."""
        if self.spec.kind in OF_THE_LOADER:
            self._patch_loaders()
        elif self.spec.kind in OF_THE_MODEL:
            model.register_forward_pre_hook(self._before_model)
            self._before_model(model, ())  # the hook does not run in the call in progress
        elif self.spec.when.in_recomputation:
            for number, layer in layers.items():
                if self._is_new(layer):
                    layer.register_forward_pre_hook(functools.partial(self._before_layer, number))
        elif self._is_new(layer := layers[self.spec.layer]):
            layer.register_forward_pre_hook(self._before_forward)
            layer.register_forward_hook(self._after_forward)

    def _is_new(self, layer: Any) -> bool:
        """Whether the layer has no hooks of the fault yet. Remember that it has them now."""
        known = layer in self._hooked
        self._hooked.add(layer)
        return not known

    def _before_model(self, model: Any, _arguments: Any) -> None:
        """If the fault is due, overwrite the matching parameters of the model with its value."""
        if not self._is_due():
            return
        for name, parameter in model.named_parameters():
            if fnmatchcase(name, self.spec.parameters):
                self._happened = True
                with self._torch.no_grad():
                    parameter.fill_(self.spec.value)

    def _patch_loaders(self) -> None:
        """Patch the data loaders of the training package and of torch, so that a due fault delays the next batch.

        Called when the model is called for the first time, so the loaders have already returned the first batch.
        """
        for loader, name in _loaders():
            fetch = getattr(loader, name)
            if not hasattr(fetch, _PATCHED):
                setattr(loader, name, self._starving(fetch))

    def _starving(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fetch)
        def perhaps_starved(*arguments: Any, **options: Any) -> Any:
            if self._is_due():
                self._happened = True
                acts.wait_for_a_feeder(self.spec.heals_s)
            return fetch(*arguments, **options)

        setattr(perhaps_starved, _PATCHED, True)
        return perhaps_starved

    def _before_layer(self, number: int, _module: Any, arguments: Any) -> None:
        """Add layer `number` to the layers recomputed in this backward pass, and act if the fault's condition is now
        met.

        A forward that runs inside a backward pass is a recomputation; other forwards are ignored.
        """
        task = self._torch._C._current_graph_task_id()
        if task < 0 or not self._is_due() or not self._long_enough(arguments):
            return
        if task != self._backward_pass:
            self._backward_pass, self._recomputed = task, set()
        self._recomputed.add(number)
        if self.spec.when.met_by(self._recomputed):
            self._happened = True
            self._act(f"step {self.spec.step}, layer {number}, {self.spec.who}")

    def _long_enough(self, arguments: Any) -> bool:
        """Whether the input of a layer, of shape [..., tokens, features], has at least as many tokens as the fault
        requires.
        """
        tensor = _first_tensor(arguments, self._torch.Tensor)
        return not self.spec.when.seq_len or (tensor is not None and tensor.shape[-2] >= self.spec.when.seq_len)

    def warn_if_it_never_happened(self) -> None:
        """Print a warning at exit if an unconditional fault never happened. Otherwise the run would be mistaken for a
        healthy one.
        """
        is_conditional = self.spec.when.is_conditional
        if os.getpid() == self._pid and self._is_our_rank() and not self._happened and not is_conditional:
            print(f"nsa-harness: the planted fault never happened: {self.spec}", file=sys.stderr, flush=True)

    def _is_our_rank(self) -> bool:
        """Whether this process is the rank in which the fault happens. A fault without a rank happens in every rank."""
        if self.spec.rank is None:
            return True
        distributed = self._torch.distributed
        if distributed.is_initialized():
            return bool(distributed.get_rank() == self.spec.rank)
        return os.environ.get("RANK", "0") == str(self.spec.rank)

    def _is_the_reduction(self) -> bool:
        """Count a call that averages the loss (one per step). Return whether this call is the one to skip or delay."""
        self._reductions += 1
        return not self._happened and self._reductions == self.spec.step and self._is_our_rank()

    def _is_due(self) -> bool:
        """Whether the fault must happen now: in this rank and step, in a suitable model, and if chance has selected
        this run.
        """
        lasts = self.spec.kind in LASTING
        now = self._step >= self.spec.step if lasts else not self._happened and self._step == self.spec.step
        return self._is_drawn and self._possible and now and self._is_our_rank()

    def _before_forward(self, _module: Any, arguments: Any) -> None:
        """Act when the fault's layer begins its forward, if the fault happens there and is due."""
        if self.spec.kind in AT_ONCE and self._is_due() and self._long_enough(arguments):
            self._happened = True
            self._act(f"step {self.spec.step}, layer {self.spec.layer}, {self.spec.who}")

    def _act(self, where: str) -> None:
        """Perform the action of the fault: block, loop, raise an exception that names `where`, or end the process."""
        if self.spec.kind == "raise":
            acts.raise_an_error(where, self.spec.heals_s)
        else:
            _ACTS[self.spec.kind](self.spec.heals_s)

    def _after_forward(self, _module: Any, arguments: Any, output: Any) -> None:
        """Act after the forward of the fault's layer, or register a hook that acts in the backward of this layer."""
        tensor = _first_tensor(output, self._torch.Tensor)
        if tensor is None or not self._is_due() or not self._long_enough(arguments):
            return
        if self.spec.kind == "slow_step":
            self._happened = True
            acts.crawl_token_by_token(self._torch, tensor, self.spec.heals_s)
        elif self.spec.kind in LASTING:
            self._happened = True
            self._leaked.append(acts.a_copy_to_keep(self._torch, tensor))
        elif self.spec.kind in BACKWARD and tensor.grad_fn is not None:
            # Here a Function.backward of the layer would run. A hook on the tensor would run before it.
            tensor.grad_fn.register_prehook(self._in_backward)

    def _in_backward(self, _gradients: Any) -> None:
        """Act in the backward of the layer, only once. Several recomputed forwards may have registered this hook."""
        if self._happened:
            return
        self._happened = True
        self._act("in backward")


def _loaders() -> Iterator[tuple[Any, str]]:
    """Yield (class, method name) for each data loader class that the process has loaded. The method returns a batch."""
    for name, module in list(sys.modules.items()):
        if name == LOADER:
            yield module.Batches, "fetch"
    from torch.utils.data import dataloader

    yield dataloader._BaseDataLoaderIter, "__next__"


def _first_tensor(output: Any, tensor_type: type) -> Any:
    """Return the first tensor in a value or in a tuple or list of values, or None if there is none."""
    items = output if isinstance(output, (tuple, list)) else (output,)
    return next((item for item in items if isinstance(item, tensor_type)), None)


def averages_the_loss(caller: dict[str, Any]) -> bool:
    """Whether the calling module, given by its globals, is one that calls all_reduce to average the loss."""
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
