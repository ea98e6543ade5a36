"""Check environment variables for torch, NCCL and gloo for wrong names and names without effect.

The names were taken from the binaries of torch 2.11 to 2.13 and the aliases in its source.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

# torch still reads these, with a warning.
OLD_NAMES = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
_TIMEOUT = "set the timeout in init_process_group (limits.stall_s is the limit of nsa-harness)"
# Names that nothing reads, each with what to do instead.
DEAD_NAMES = {
    "NCCL_TRACE_BUFFER_SIZE": "write TORCH_FR_BUFFER_SIZE",
    "NCCL_DUMP_ON_TIMEOUT": "write TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_ON_TIMEOUT": "torch reads it only since 2.14; write TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "torch reads it only since 2.14; write TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "torch always does this; remove it",
    "ENABLE_NCCL_HEALTH_CHECK": "torch no longer has this check; remove it",
    "DDP_BUCKET_CAP_MB": "the size is an argument of DDP; set parallel.bucket_cap_mb",
    **dict.fromkeys(("NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT", "GLOO_TIMEOUT", "TORCH_GLOO_TIMEOUT"), _TIMEOUT),
    "DDP_TIMEOUT": _TIMEOUT,
}
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
_VALUES = {
    _DEBUG: (("OFF", "INFO", "DETAIL"), ""),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("1", "3"), "; with another value, torch never ends a rank that hangs"),
}
_KNOWN = """
    TORCH_FR_BUFFER_SIZE TORCH_FR_CPP_STACK TORCH_FR_DUMP_TEMP_FILE TORCH_FR_DUMP_DYNAMIC_FILE_NAME
    TORCH_INCLUDE_STACK_TRACE TORCH_INCLUDE_ONLY_ACTIVE TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_DUMP_ON_TIMEOUT
    TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_COORD_CHECK_MILSEC
    TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_PROPAGATE_ERROR TORCH_NCCL_NAN_CHECK
    TORCH_NCCL_RETHROW_CUDA_ERRORS TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN TORCH_NCCL_EXTRA_DUMP_ON_EXEC
    TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_RANKS_PER_ROOT TORCH_NCCL_BCAST_UNIQUEID
    TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_NCCL_NONBLOCKING_TIMEOUT TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK
    TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL
    TORCH_SHOW_CPP_STACKTRACES TORCH_DISABLE_ADDR2LINE TORCH_SYMBOLIZE_MODE TORCH_GLOO_LAZY_INIT
    TORCH_DIST_INIT_BARRIER TORCH_LOGS TORCH_COMPILE_DEBUG TORCHDYNAMO_DISABLE TORCHINDUCTOR_CACHE_DIR
    GLOO_SOCKET_IFNAME GLOO_DEVICE_TRANSPORT GLOO_LOG_LEVEL GLOO_DISABLE_CONNECTION_RETRIES
    GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER DDP_SET_LAST_BUCKET_CAP DDP_DISABLE_COMM_MEM
    PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING CUDA_LAUNCH_BLOCKING
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_MODULE_LOADING CUDA_DEVICE_MAX_CONNECTIONS CUBLAS_WORKSPACE_CONFIG
    OMP_NUM_THREADS MKL_NUM_THREADS PYTHONHASHSEED PYTHONUNBUFFERED PYTHONFAULTHANDLER TRITON_INTERPRET
    TRITON_CACHE_DIR
    NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DEBUG_FILE NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_NTHREADS
    NCCL_NSOCKS_PERTHREAD NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_CROSS_NIC NCCL_IB_HCA
    NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_GID_INDEX NCCL_IB_ADDR_FAMILY NCCL_IB_ADDR_RANGE
    NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_TC NCCL_IB_AR_THRESHOLD NCCL_IB_QPS_PER_CONNECTION
    NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_CUDA_SUPPORT NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_ADAPTIVE_ROUTING
    NCCL_IB_DISABLE NCCL_NET NCCL_NET_PLUGIN NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_SHARED_BUFFERS
    NCCL_NET_SHARED_COMMS NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN NCCL_P2P_DISABLE NCCL_P2P_LEVEL
    NCCL_P2P_DIRECT_DISABLE NCCL_P2P_NET_CHUNKSIZE NCCL_SHM_DISABLE NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MAX_NCHANNELS
    NCCL_MIN_NCHANNELS NCCL_MAX_CTAS NCCL_MIN_CTAS NCCL_CHECKS_DISABLE NCCL_CHECK_POINTERS NCCL_LAUNCH_MODE
    NCCL_ALGO NCCL_PROTO NCCL_NVB_DISABLE NCCL_PXN_DISABLE NCCL_PXN_C2C NCCL_P2P_PXN_LEVEL NCCL_RUNTIME_CONNECT
    NCCL_GRAPH_REGISTER NCCL_LOCAL_REGISTER NCCL_SET_THREAD_NAME NCCL_GRAPH_MIXING_SUPPORT NCCL_DMABUF_ENABLE
    NCCL_COLLNET_ENABLE NCCL_COLLNET_NODE_THRESHOLD NCCL_NVLS_ENABLE NCCL_NVLS_NCHANNELS NCCL_CUMEM_ENABLE
    NCCL_CUMEM_HOST_ENABLE NCCL_MNNVL_ENABLE NCCL_MNNVL_UUID NCCL_MNNVL_CLIQUE_ID NCCL_RAS_ENABLE NCCL_RAS_ADDR
    NCCL_RAS_TIMEOUT_FACTOR NCCL_COMM_BLOCKING NCCL_COMM_ID NCCL_CONF_FILE NCCL_HOSTID NCCL_TOPO_FILE
    NCCL_TOPO_DUMP_FILE NCCL_GRAPH_FILE NCCL_GRAPH_DUMP_FILE NCCL_IGNORE_CPU_AFFINITY NCCL_WORK_FIFO_DEPTH
    NCCL_WIN_ENABLE NCCL_SINGLE_RING_THRESHOLD NCCL_LL_THRESHOLD NCCL_TREE_THRESHOLD
    """
KNOWN_NAMES = frozenset(_KNOWN.split())
# Names with one wrong letter, or two swapped letters, are at least this similar. Different names are less similar.
_TYPO_SIMILARITY = 0.91
CUDA_PREFIXES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_CUDA_", "CUBLAS_")
_NCCL_PREFIXES = ("NCCL_", "TORCH_NCCL_")


def name_mistakes(env: Mapping[str, str], overridden: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a name and a message for each variable without the intended effect."""
    for name, value in env.items():
        if message := _wrong_name(name, overridden) or _wrong_value(name, value):
            yield name, message


def effect_notes(env: Mapping[str, str], *, device: str, backend: str) -> Iterator[str]:
    """Yield notes on variables that have no effect, or a side effect, with this device and backend."""
    if device == "cpu":
        unused_names, reason = [name for name in env if name.startswith(CUDA_PREFIXES)], "the device is cpu"
    else:
        unused_names, reason = [name for name in env if name.startswith(_NCCL_PREFIXES)], f"the backend is {backend}"
        unused_names = unused_names if backend == "gloo" else []
    if unused_names:
        yield f"no effect, because {reason}: {', '.join(sorted(unused_names))}"
    if env.get("TORCH_NCCL_BLOCKING_WAIT") == "1" and not unused_names:
        yield "TORCH_NCCL_BLOCKING_WAIT=1 disables NCCL's watchdog; only nsa-harness will notice a hang"


def sound_environment(
    env: Mapping[str, str], *, torch: str | None, backend: str, ddp: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment without values that crash this version of torch, and notes on the changes.

    In torch 2.13, TORCH_DISTRIBUTED_DEBUG=DETAIL crashes every DDP job over gloo with a segmentation fault in
    c10d::Logger::set_env_variables, even a healthy job with one rank. INFO reports the same parameters.
    """
    crashes = env.get(_DEBUG) == "DETAIL" and ddp and backend == "gloo" and (torch or "").startswith("2.13.")
    if not crashes:
        return dict(env), ()
    note = f"{_DEBUG} is INFO instead of DETAIL, because DETAIL crashes DDP over gloo in torch {torch}"
    return {**env, _DEBUG: "INFO"}, (note,)


def _wrong_name(name: str, overridden: Mapping[str, str]) -> str | None:
    if name in OLD_NAMES:
        return f"is an old name; write {OLD_NAMES[name]}"
    if name in DEAD_NAMES:
        return f"nothing reads this variable; {DEAD_NAMES[name]}"
    if name in overridden:
        return overridden[name]
    if name in KNOWN_NAMES:
        return None
    close = difflib.get_close_matches(name, KNOWN_NAMES, n=1, cutoff=_TYPO_SIMILARITY)
    return f'nothing reads this variable; did you mean "{close[0]}"?' if close else None


def _wrong_value(name: str, value: str) -> str | None:
    choices, reason = _VALUES.get(name, ((), ""))
    if not choices or value in choices:
        return None
    return f'expected {", ".join(choices[:-1])} or {choices[-1]}, got "{value}"{reason}'
