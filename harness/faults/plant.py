"""Where and when a planted fault happens: the rank, the step in progress, the layer's module, found in any model."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from . import acts

# The loss is averaged by the training program itself; gradients that are averaged by hand are another collective.
CALLERS = ("__main__", "nsa.train", "nsa.world")
INSTALLED_BELOW = "nsa_harness."  # the package that our nsa lies in where we are installed


def plant(text: str) -> None:
    """Plant the fault that `text` describes. Torch is imported by then. Raises ValueError for what is no fault."""
    fault = PlantedFault(FaultSpec(text), sys.modules["torch"])
    fault.count_steps()
    if fault.spec.kind in COLLECTIVE:
        fault.cover_all_reduce()
    elif fault.spec.when.in_recomputation:
        fault.watch_for_recomputation()
    else:
        fault.watch_for_the_layer()
    atexit.register(fault.say_if_it_never_happened)


class PlantedFault:
    """One fault in one process. It happens once."""

    def __init__(self, spec: FaultSpec, torch: Any) -> None:
        self.spec = spec
        self._torch = torch
        self._step = 1
        self._reductions = 0
        self._happened = False
        self._again: set[int] = set()  # layers that the backward pass in progress has computed again
        self._pass = -1  # which backward pass that is
        self._lot = random.SystemRandom().random() < self.spec.when.chance
        self._pid = os.getpid()
        self._counting: Callable[[], object] = lambda: None

    def count_steps(self) -> None:
        """Steps are those of the first optimizer that steps."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def after_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
            if self._counting() is None:
                self._counting = weakref.ref(optimizer)
            if self._counting() is optimizer:
                self._step += 1

        register_optimizer_step_post_hook(after_step)

    def cover_all_reduce(self) -> None:
        """Outermost, so that a probe sees what a program without the call would show it: nothing."""
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

    def watch_for_the_layer(self) -> None:
        """Look at each module that is called until one of them contains the layer; then hook that layer alone."""
        hooks = self._torch.nn.modules.module

        def look_inside(module: Any, _arguments: Any) -> None:
            layer = find_layer(module, self.spec.layer)
            if layer is not None:
                handle.remove()
                layer.register_forward_pre_hook(self._before_forward)
                layer.register_forward_hook(self._after_forward)

        handle = hooks.register_module_forward_pre_hook(look_inside)

    def watch_for_recomputation(self) -> None:
        """Hook every layer of the first model that is called."""
        hooks = self._torch.nn.modules.module

        def look_inside(module: Any, _arguments: Any) -> None:
            layers = list(every_layer(module))
            if len(layers) > 1:
                handle.remove()
                for number, layer in layers:
                    layer.register_forward_pre_hook(functools.partial(self._before_layer, number))

        handle = hooks.register_module_forward_pre_hook(look_inside)

    def _before_layer(self, number: int, _module: Any, arguments: Any) -> None:
        """A forward inside a backward pass computes the layer again."""
        task = self._torch._C._current_graph_task_id()
        if task < 0 or not self._is_due() or not self._long_enough(arguments):
            return
        if task != self._pass:
            self._pass, self._again = task, set()
        self._again.add(number)
        if self.spec.when.met_by(self._again):
            self._happened = True
            self._act(f"step {self.spec.step}, layer {number}, rank {self.spec.rank}")

    def _long_enough(self, arguments: Any) -> bool:
        """The tokens of what goes into a layer, as [..., tokens, features]."""
        tensor = _first_tensor(arguments, self._torch.Tensor)
        return not self.spec.when.seq_len or (tensor is not None and tensor.shape[-2] >= self.spec.when.seq_len)

    def say_if_it_never_happened(self) -> None:
        """A fault that was asked for and did not happen must not look like a healthy run, unless it depends on it."""
        depends = self.spec.when.depends
        if os.getpid() == self._pid and self._is_our_rank() and not self._happened and not depends:
            print(f"nsa-harness: the planted fault never happened: {self.spec}", file=sys.stderr, flush=True)

    def _is_our_rank(self) -> bool:
        distributed = self._torch.distributed
        if distributed.is_initialized():
            return bool(distributed.get_rank() == self.spec.rank)
        return os.environ.get("RANK", "0") == str(self.spec.rank)

    def _is_the_reduction(self) -> bool:
        """One reduction a step, before the optimizer or after it: so they are counted, not the steps."""
        self._reductions += 1
        return not self._happened and self._reductions == self.spec.step and self._is_our_rank()

    def _is_due(self) -> bool:
        return self._lot and not self._happened and self._step == self.spec.step and self._is_our_rank()

    def _before_forward(self, _module: Any, arguments: Any) -> None:
        if self.spec.kind in BACKWARD or self.spec.kind == "slow_step" or not self._is_due():
            return
        if self._long_enough(arguments):
            self._happened = True
            self._act(f"step {self.spec.step}, layer {self.spec.layer}, rank {self.spec.rank}")

    def _act(self, where: str) -> None:
        if self.spec.kind == "raise":
            acts.raise_an_error(where, self.spec.heals_s)
        else:
            _ACTS[self.spec.kind](self.spec.heals_s)

    def _after_forward(self, _module: Any, arguments: Any, output: Any) -> None:
        tensor = _first_tensor(output, self._torch.Tensor)
        if tensor is None or not self._is_due() or not self._long_enough(arguments):
            return
        if self.spec.kind == "slow_step":
            self._happened = True
            acts.crawl_token_by_token(self._torch, tensor, self.spec.heals_s)
        elif self.spec.kind in BACKWARD and tensor.grad_fn is not None:
            # Where a Function.backward of the layer would run. A hook on the tensor would come before the layer's own.
            tensor.grad_fn.register_prehook(self._in_backward)

    def _in_backward(self, _gradients: Any) -> None:
        """Once, however many recomputed forwards have hooked their outputs."""
        if self._happened:
            return
        self._happened = True
        self._act("in backward")


def find_layer(root: Any, layer: int) -> Any:
    """The shallowest module whose first number in its qualified name is `layer`, or its child `attn` if it has one."""
    return dict(every_layer(root)).get(layer)


def every_layer(root: Any) -> Iterator[tuple[int, Any]]:
    """Each layer's number and module, as `find_layer` finds it."""
    best: dict[int, tuple[int, Any]] = {}
    for path, module in root.named_modules():
        parts = path.split(".")
        number = next((int(part) for part in parts if part.isdigit()), None)
        if number is not None and (number not in best or len(parts) < best[number][0]):
            best[number] = (len(parts), module)
    for number, (_, module) in best.items():
        yield number, _attention(module) or module


def _attention(block: Any) -> Any:
    """`attn` of a block, also where FSDP or checkpoint is wrapped around the block."""
    for path, module in block.named_modules():
        if path.split(".")[-1] == "attn":
            return module
    return None


def _first_tensor(output: Any, tensor_type: type) -> Any:
    items = output if isinstance(output, (tuple, list)) else (output,)
    return next((item for item in items if isinstance(item, tensor_type)), None)


def averages_the_loss(caller: dict[str, Any]) -> bool:
    return str(caller.get("__name__")).removeprefix(INSTALLED_BELOW) in CALLERS


FORWARD = ("raise", "sigkill", "sigstop", "exit0", "slow_step")
BACKWARD = ("deadlock", "endless_loop")
COLLECTIVE = ("skip_collective",)
KINDS = (*FORWARD, *BACKWARD, *COLLECTIVE)
_ACTS = {
    "sigkill": acts.send_itself_sigkill,
    "sigstop": acts.send_itself_sigstop,
    "exit0": acts.leave_with_status_0,
    "slow_step": acts.come_late,
    "deadlock": acts.take_a_held_lock,
    "endless_loop": acts.spin_in_python,
}


class FaultSpec:
    """Raises ValueError with the reason. `layer` is 0-based and not needed for collectives, `step` is 1-based."""

    def __init__(self, text: str) -> None:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a fault is a JSON object, got {text[:80]!r}")
        self.kind = str(fields.get("kind"))
        if self.kind not in KINDS:
            raise ValueError(f"fault kind {self.kind!r} is none of {', '.join(KINDS)}")
        self.rank = _whole("rank", fields.get("rank"), at_least=0)
        self.step = _whole("step", fields.get("step") or 1, at_least=1)
        self.when = FaultCondition(fields.get("when") or {})
        nowhere = self.kind in COLLECTIVE or self.when.in_recomputation
        self.layer = -1 if nowhere else _whole("layer", fields.get("layer"), at_least=0)
        heals_s = fields.get("heals_s")
        if heals_s is not None and (isinstance(heals_s, bool) or not isinstance(heals_s, (int, float)) or heals_s < 0):
            raise ValueError(f"fault heals_s is a number of seconds, got {heals_s!r}")
        self.heals_s: float | None = heals_s

    def __str__(self) -> str:
        where = "" if self.layer < 0 else f", layer {self.layer}"
        return f"{self.kind} on rank {self.rank}{where}, step {self.step}"


class FaultCondition:
    """On what a fault depends besides its rank and step; a key that is missing or null asks nothing."""

    def __init__(self, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"fault when is a JSON object, got {fields!r}")
        self.recomputed = {_whole("layer", layer, at_least=0) for layer in fields.get("recomputed") or ()}
        self.any_recomputed = {_whole("layer", layer, at_least=0) for layer in fields.get("any_recomputed") or ()}
        self.recomputed_layers = _whole("recomputed_layers", fields.get("recomputed_layers") or 0, at_least=0)
        self.seq_len = _whole("seq_len", fields.get("seq_len") or 0, at_least=0)
        chance = fields.get("chance")
        self.chance = 1.0 if chance is None else float(chance)

    @property
    def in_recomputation(self) -> bool:
        """It comes true where a layer is computed again."""
        return bool(self.recomputed or self.any_recomputed or self.recomputed_layers)

    @property
    def depends(self) -> bool:
        """A run in which it does not happen is what was asked for."""
        return self.in_recomputation or self.seq_len > 0 or self.chance < 1.0

    def met_by(self, again: set[int]) -> bool:
        """`again`: the layers that this backward pass has computed again so far."""
        some = not self.any_recomputed or bool(self.any_recomputed & again)
        return some and self.recomputed <= again and len(again) >= self.recomputed_layers


def _whole(name: str, value: Any, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"fault {name} is a whole number from {at_least}, got {value!r}")
    return value
