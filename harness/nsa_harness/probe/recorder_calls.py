"""Finds the calls that communicate with other ranks, or that run such calls, and reads their arguments."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from .. import protocol
from . import values

_OPERATION = re.compile(
    r"(all_|reduce|broadcast|gather|scatter|barrier|monitored_barrier|i?send|i?recv|to_all|permute)|(new_|split_|shrink_|init_|destroy_).*group|new_subgroups"
)
_GROUP_CHANGES = re.compile(r"new_|split_|shrink_|init_|destroy_")
_PUBLIC_FILES = (
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("torch", "distributed", "_functional_collectives.py"),
    os.path.join("torch", "distributed", "nn", "functional.py"),
)
_BACKWARD_FILES = (os.path.join("torch", "_tensor.py"), os.path.join("torch", "autograd", "__init__.py"))
_DDP_FILE = os.path.join("torch", "nn", "parallel", "distributed.py")
_OF_DDP = {
    "DistributedDataParallel.__init__": "DistributedDataParallel",
    "DistributedDataParallel._sync_buffers": "sync_buffers",
}
_OPTIMIZER_FILE = os.path.join("torch", "optim", "optimizer.py")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_PAYLOADS = ("tensor", "input", "input_tensor", "input_list", "input_tensor_list", "tensors", "p2p_op_list", "self")
RANKS_LIMIT = 1024


def operation_of(code: Any) -> str:
    """Return the operation that a function of a library performs, or "" if it does not communicate.

    "step" is no communication: it is a step of an optimizer.
    """
    name, file = code.co_name, code.co_filename
    if name == "no_sync":
        return str(name)
    if name == "backward" and file.endswith(_BACKWARD_FILES):
        return "backward"
    qualified = getattr(code, "co_qualname", name)
    if file.endswith(_DDP_FILE):
        return _OF_DDP.get(qualified, "")
    if file.endswith(_OPTIMIZER_FILE) and qualified == "Optimizer.profile_hook_step.<locals>.wrapper":
        return "step"
    if name.startswith(("_", "get_", "is_", "supports_")) or not _OPERATION.match(name):
        return ""
    return str(name) if file.endswith(_PUBLIC_FILES) else ""


class Arguments:
    """A reader of the arguments of calls that communicate."""

    def __init__(self) -> None:
        # id of a group -> the group and its global ranks. The reference keeps the id valid.
        self._groups: dict[int, tuple[Any, tuple[int, ...]]] = {}

    def numbers(self, operation: str, frame: Any, string: Any) -> list[int]:
        """Return the numbers of RECORD_COMMUNICATION after the order of the calling execution."""
        root = peer = tag = protocol.RECORD_ABSENT
        ranks: tuple[int, ...] = ()
        shape: tuple[int, ...] = ()
        kind = ""
        try:
            local = frame.f_locals
            if _GROUP_CHANGES.match(operation):
                self._groups.clear()
                ranks = _integers(local.get("ranks"))
            elif operation not in ("backward", "no_sync", "step", "DistributedDataParallel"):
                group = local.get("group")
                ranks = self._ranks(group)
                partner = self._partner(local, ranks)
                if operation.startswith(_ROOTED):
                    root = partner
                else:
                    peer = partner
                tag = _integer(local.get("tag"))
            shape, kind = _payload(local)
        except Exception:  # what is known so far is recorded
            pass
        ranks = ranks[:RANKS_LIMIT]
        return [string(operation), root, peer, tag, string(kind), len(ranks), *ranks, *shape]

    def _ranks(self, group: Any) -> tuple[int, ...]:
        """Return the global ranks of a group, or () if they are unknown."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        if module is None:
            return ()
        if group is None:
            group = module.GroupMember.WORLD
        known = self._groups.get(id(group))
        if known is None:
            members = module._world.pg_group_ranks
            is_group = type(group) is module.ProcessGroup
            known = self._groups[id(group)] = (group, tuple(sorted(members[group])) if is_group else ())
        return known[1]

    def _partner(self, local: Any, ranks: tuple[int, ...]) -> int:
        for name in ("src", "dst", "root"):
            if (partner := _integer(local.get(name))) != protocol.RECORD_ABSENT:
                return partner
        for name in ("group_src", "group_dst"):
            partner = _integer(local.get(name))
            if 0 <= partner < len(ranks):
                return ranks[partner]
        return protocol.RECORD_ABSENT


def _integer(value: Any) -> int:
    is_short = type(value) is int and -(2**31) < value < 2**31
    return value if is_short else protocol.RECORD_ABSENT


def _integers(items: Any) -> tuple[int, ...]:
    plain = items if type(items) is list or type(items) is tuple or type(items) is range else ()
    return tuple(one for one in plain[:RANKS_LIMIT] if _integer(one) != protocol.RECORD_ABSENT)


def _payload(local: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape and the dtype of the tensor, or of the first tensor in a list, that a call got."""
    payload = next((local[name] for name in _PAYLOADS if local.get(name) is not None), None)
    if (type(payload) is list or type(payload) is tuple) and payload:
        payload = payload[0]
    if not values.is_tensor(payload):
        payload = values.attribute(payload, "tensor")
    return values.tensor_shape(payload) if values.is_tensor(payload) else ((), "")
