"""Reads the JSON description of a planted fault, with its kind, location and conditions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

BEFORE_FORWARD = ("raise", "sigkill", "sigstop", "exit0")  # kinds that happen when the layer's forward begins
FORWARD = (*BEFORE_FORWARD, "slow_step")
BACKWARD = ("deadlock", "endless_loop")
COLLECTIVE = ("skip_collective",)
PERSISTENT = ("leak",)  # kinds that happen in the fault's step and in every later step
IN_MODEL = ("set_parameters",)
IN_LOADER = ("starved_loader",)
LAYERLESS = (*COLLECTIVE, *IN_MODEL, *IN_LOADER)
KINDS = (*FORWARD, *BACKWARD, *COLLECTIVE, *PERSISTENT, *IN_MODEL, *IN_LOADER)
WITHOUT_TWIN = (*PERSISTENT, *IN_MODEL)  # kinds without a healthy twin, because their effect does not end


class FaultSpec:
    """The description of a planted fault, read from JSON.

    The constructor raises ValueError if the text is invalid. `layer` counts from 0, and -1 means no layer. `step`
    counts from 1. `rank` is None if the fault happens in every rank.
    """

    def __init__(self, text: str) -> None:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a fault must be a JSON object, got {text[:80]!r}")
        self.kind = str(fields.get("kind"))
        if self.kind not in KINDS:
            raise ValueError(f"fault kind {self.kind!r} is unknown; the kinds are {', '.join(KINDS)}")
        rank = fields.get("rank")
        self.rank = None if rank is None else _whole_number("rank", rank, at_least=0)  # None = every rank
        self.step = _whole_number("step", fields.get("step") or 1, at_least=1)
        self.when = FaultCondition(fields.get("when") or {})
        has_no_layer = self.kind in LAYERLESS or self.when.in_recomputation
        self.layer = -1 if has_no_layer else _whole_number("layer", fields.get("layer"), at_least=0)
        self.heals_s = _seconds("heals_s", fields.get("heals_s"))
        self.parameters = str(fields.get("parameters") or "")
        self.value = _number("value", fields.get("value") or 0)

    @property
    def rank_text(self) -> str:
        return "every rank" if self.rank is None else f"rank {self.rank}"

    def __str__(self) -> str:
        where = "" if self.layer < 0 else f", layer {self.layer}"
        return f"{self.kind} on {self.rank_text}{where}, step {self.step}"


class FaultCondition:
    """Conditions, in addition to the rank and step, under which a fault occurs."""

    def __init__(self, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"fault when must be a JSON object, got {fields!r}")
        self.recomputed = {_whole_number("layer", layer, at_least=0) for layer in fields.get("recomputed") or ()}
        self.any_recomputed = {
            _whole_number("layer", layer, at_least=0) for layer in fields.get("any_recomputed") or ()
        }
        self.recomputed_layers = _whole_number("recomputed_layers", fields.get("recomputed_layers") or 0, at_least=0)
        self.seq_len = _whole_number("seq_len", fields.get("seq_len") or 0, at_least=0)
        self.layers = _whole_number("layers", fields.get("layers") or 0, at_least=0)
        self.ranks = _whole_number("ranks", fields.get("ranks") or 0, at_least=0)
        self.module: str | None = fields.get("module")
        self.backend: str | None = fields.get("backend")
        self.ddp_options = {name: fields[name] for name in _DDP_OPTIONS if fields.get(name) is not None}
        chance = fields.get("chance")
        self.chance = 1.0 if chance is None else float(chance)

    @property
    def in_recomputation(self) -> bool:
        """Whether the fault occurs while a layer is recomputed for the backward pass."""
        return bool(self.recomputed or self.any_recomputed or self.recomputed_layers)

    @property
    def depends_on_job(self) -> bool:
        """Whether the fault occurs only in certain models or jobs, such as jobs with a certain number of ranks."""
        return bool(self.layers or self.ranks or self.module or self.backend or self.ddp_options)

    @property
    def is_conditional(self) -> bool:
        """Whether the fault has a condition that could remain unmet in a correct run."""
        return self.in_recomputation or self.depends_on_job or self.seq_len > 0 or self.chance < 1.0

    def is_met_by_recomputation(self, recomputed_now: set[int]) -> bool:
        """Return whether the layers recomputed so far meet the fault's conditions."""
        has_one = not self.any_recomputed or bool(self.any_recomputed & recomputed_now)
        return has_one and self.recomputed <= recomputed_now and len(recomputed_now) >= self.recomputed_layers

    def is_met_by_job(self, model: Any, dist: Any) -> bool:
        """Return whether the outermost model and torch.distributed (`dist`) meet the fault's conditions."""
        has_group = dist.is_initialized()
        if self.ranks > (dist.get_world_size() if has_group else 1):
            return False
        if self.backend is not None and (not has_group or dist.get_backend() != self.backend):
            return False
        if self.layers > len(dict(every_layer(model))):
            return False
        if self.ddp_options and type(model).__name__ != _DDP:
            return False
        # FSDP2 replaces a module's class by a class whose name begins with "FSDP".
        classes = {type(module).__name__ for module in model.modules()}
        has_module = self.module is None or bool({self.module, f"FSDP{self.module}"} & classes)
        return has_module and all(getattr(model, name) is value for name, value in self.ddp_options.items())


_DDP = "DistributedDataParallel"
_DDP_OPTIONS = ("find_unused_parameters", "static_graph")


def every_layer(root: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number and the module of each layer of the model."""
    shallowest: dict[int, tuple[int, Any]] = {}
    for path, module in root.named_modules():
        parts = path.split(".")
        number = next((int(part) for part in parts if part.isdigit()), None)
        if number is not None and (number not in shallowest or len(parts) < shallowest[number][0]):
            shallowest[number] = (len(parts), module)
    for number, (_, module) in shallowest.items():
        yield number, _attention(module) or module


def _attention(block: Any) -> Any:
    """Return the module named `attn` inside a block, even inside a wrapper, or None if there is none."""
    for path, module in block.named_modules():
        if path.split(".")[-1] == "attn":
            return module
    return None


def _whole_number(name: str, value: Any, *, at_least: int) -> int:
    """Return `value`, the setting called `name`, if it is an integer of at least `at_least`, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"fault {name} must be an integer of at least {at_least}, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"fault {name} must be a number, got {value!r}")
    return float(value)


def _seconds(name: str, value: Any) -> float | None:
    """Return `value` as a number of seconds, or None if it is None. Raise ValueError if it is invalid."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError(f"fault {name} must be a number of seconds, got {value!r}")
    return value
