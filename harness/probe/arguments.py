"""What a call of a collective says of itself: its process group, its payload, its partner."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# What a rank gives away, under the names the operations have for it.
PAYLOADS = ("tensor", "input", "input_tensor", "input_list", "input_tensor_list", "tensors", "p2p_op_list", "self")
# The partner of a transfer, and the root of a collective that has one.
PARTNERS = {
    "broadcast": ("src", "group_src"),
    "broadcast_object_list": ("src", "group_src"),
    "scatter": ("src", "group_src"),
    "scatter_object_list": ("src", "group_src"),
    "reduce": ("dst", "group_dst"),
    "gather": ("dst", "group_dst"),
    "gather_object": ("dst", "group_dst"),
    "send": ("dst", "group_dst"),
    "isend": ("dst", "group_dst"),
    "send_object_list": ("dst", "group_dst"),
    "recv": ("src", "group_src"),
    "irecv": ("src", "group_src"),
    "recv_object_list": ("src", "group_src"),
}
ELEMENTS_MAX = 2**64 - 1
NOBODY = -1

Find = Callable[[Any, Any], Any]


class Said:
    """Reads the calls of one function. None of its methods changes what it reads."""

    def __init__(self, torch: Any, c10d: Any, name: str, function: Callable[..., Any]) -> None:
        self._c10d = c10d
        self._tensor_type = torch.Tensor
        self._group = _argument(function, "group")
        self._payload = _argument(function, *PAYLOADS)
        self._world_size = _argument(function, "world_size")
        partner, partner_in_group = PARTNERS.get(name, ("", ""))
        self._partner = _argument(function, partner)
        self._partner_in_group = _argument(function, partner_in_group)

    def group_name(self, arguments: Any, options: Any) -> str:
        """A ProcessGroup, its name, a mesh of one axis, or (mesh, axis); "" for what is none of these."""
        group = self._group(arguments, options)
        if group is None:
            group = getattr(self._first_operation(arguments, options), "group", None) or self._c10d.GroupMember.WORLD
        if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
            group = group[0].get_group(group[1])
        elif hasattr(group, "get_group") and group.ndim == 1:
            group = group.get_group()
        return group if isinstance(group, str) else str(getattr(group, "group_name", ""))

    def size(self, arguments: Any, options: Any) -> tuple[int, str]:
        """Elements and type of what this rank gives; a size that is only a symbol while torch traces counts as 0.

        Whoever joins or makes a job gives nothing, and may say of how many ranks it is.
        """
        expected = self._world_size(arguments, options)
        if isinstance(expected, int):
            return max(expected, 0), ""
        payload = self._payload(arguments, options)
        items = payload if isinstance(payload, (list, tuple)) else (payload,)
        given: list[Any] = [getattr(item, "tensor", item) for item in items]
        tensors = [tensor for tensor in given if isinstance(tensor, self._tensor_type)]
        if not tensors:
            return 0, ""
        sizes = [tensor.numel() for tensor in tensors]
        elements = sum(size for size in sizes if isinstance(size, int))
        return min(elements, ELEMENTS_MAX), str(tensors[0].dtype).replace("torch.", "")

    def peer(self, arguments: Any, options: Any) -> int:
        """The global rank of the partner or root; of a batch the one that all its operations have, else nobody."""
        partner = self._partner(arguments, options)
        if partner is not None:
            return int(partner)
        in_group = self._partner_in_group(arguments, options)
        if in_group is not None:
            group = self._group(arguments, options) or self._c10d.GroupMember.WORLD
            return int(self._c10d.get_global_rank(group, in_group))
        peers = {peer for _, peer in self.operations(arguments, options)}
        return peers.pop() if len(peers) == 1 else NOBODY

    def operations(self, arguments: Any, options: Any) -> list[tuple[str, int]]:
        """Of a batch of point-to-point operations: isend or irecv, and with whom."""
        return [(str(each.op.__name__), int(each.peer)) for each in self._operations(arguments, options)]

    def _operations(self, arguments: Any, options: Any) -> list[Any]:
        payload = self._payload(arguments, options)
        return [item for item in payload if hasattr(item, "peer")] if isinstance(payload, (list, tuple)) else []

    def _first_operation(self, arguments: Any, options: Any) -> Any:
        return next(iter(self._operations(arguments, options)), None)


def _argument(function: Callable[..., Any], *wanted: str) -> Find:
    """How to find the first of the wanted parameters in a call, whether it is passed by position or by name."""
    parameters = list(inspect.signature(function).parameters)
    name: str | None = next((each for each in wanted if each in parameters), None)
    position = parameters.index(name) if name else 0

    def find(arguments: Any, options: Any) -> Any:
        if name is None:
            return None
        return options.get(name, arguments[position] if len(arguments) > position else None)

    return find
