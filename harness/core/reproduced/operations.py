"""Operations that a generated script can make: the only words of a run that ever reach its text."""

from __future__ import annotations

MOST_ELEMENTS = 1 << 24

# Names of the flight recorder and of Python, each with the operation of the script.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_tensor": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "alltoall_base": "all_to_all_single",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "all_gather_object": "all_gather_object",
    "broadcast_object_list": "broadcast_object_list",
}
MAKERS = {"new_group": "new_group"}
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "broadcast_object_list"})
TRANSFERS = frozenset({"send", "recv", "isend", "irecv"})

_NAMES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_RECORDED = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
DTYPES = {**_RECORDED, **{prefix + name: name for name in _NAMES for prefix in ("", "torch.")}}

# In terms of the script's names: tensor, where (the group), first (the root; its first member), size, peer, started.
STATEMENTS = {
    "all_reduce": "dist.all_reduce(tensor, group=where)",
    "broadcast": "dist.broadcast(tensor, first, group=where)",
    "reduce": "dist.reduce(tensor, first, group=where)",
    "all_gather": "dist.all_gather([torch.empty_like(tensor) for _ in range(size)], tensor, group=where)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(tensor.repeat(size), tensor, group=where)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(tensor.clone(), tensor.repeat(size), group=where)",
    "all_to_all_single": "dist.all_to_all_single(tensor.repeat(size), tensor.repeat(size), group=where)",
    "gather": "dist.gather(tensor, [tensor.clone() for _ in range(size)] if rank == first else None, first, where)",
    "scatter": "dist.scatter(tensor, [tensor.clone() for _ in range(size)] if rank == first else None, first, where)",
    "barrier": "dist.barrier(group=where)",
    "monitored_barrier": "dist.monitored_barrier(group=where)",
    "all_gather_object": "dist.all_gather_object([None] * size, rank, group=where)",
    "broadcast_object_list": "dist.broadcast_object_list([rank], first, group=where)",
    "new_group": "dist.new_group()",
    "send": "dist.send(tensor, peer)",
    "recv": "dist.recv(tensor, peer)",
    "isend": "started.append(dist.isend(tensor, peer))",
    "irecv": "started.append(dist.irecv(tensor, peer))",
}
