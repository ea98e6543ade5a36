"""Predict the execution time of a GPU kernel from its machine code, without any measurement.

A multiprocessor holds a few programs at a time. One pass of a program through its loop uses several stations: tensor
cores, issue slots (including slower pipes), shared memory, L2 and memory. A program that runs alone needs `alone`
cycles for a pass. With many programs only the busiest station counts, which takes `busiest` cycles. With k programs a
pass takes

    slowdown * (busiest + (alone - busiest) / k)

For two equally busy stations this is the mean value analysis of a closed queueing network with k customers. `alone` is
simulated from the compiler's schedule (warp_schedule.py). `slowdown` is fitted to published times (calibration.py). It
covers what is not modelled, such as bank conflicts and the clock under load. Memory is a limit of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.sass import LANES, mma_operations, operand_bytes


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Hardware constants of a GPU. The source of each number is in `REASONS`."""

    capability: int = 90
    multiprocessors: int = 132
    clock_hz: float = 1.755e9
    registers: int = 65536
    shared_bytes: int = 228 * 1024
    reserved_bytes: int = 1024
    warps: int = 64
    schedulers: int = 4
    half_rate_cycles: int = 2
    exponential_cycles: int = 8
    operations_per_s: float = 790e12
    warp_products_share: float = 0.63
    shared_bytes_per_cycle: int = 128
    l2_bytes: float = 60e6
    l2_bytes_per_s: float = 5.6e12
    l2_latency_cycles: int = 270
    load_bytes_per_cycle: int = 64
    memory_bytes_per_s: float = 4.3e12
    memory_latency_cycles: int = 600
    slowdown: float = 1.37
    torch_operation_us: float = 5.0
    kernel_launch_us: float = 20.0
    own_operator_us: float = 30.0
    small_kernel_us: float = 2.5


REASONS = {
    "capability": "compute capability, times ten",
    "multiprocessors": "132 of an H100 and an H200 SXM, 108 of an A100",
    "clock_hz": "boost under load: H100 between 1.395 GHz at a power limit (Chips and Cheese, 2023) and 1.98 GHz at "
    "most; an A100 stays at 1.41 GHz (same source)",
    "registers": "of a multiprocessor, CUDA programming guide, compute capabilities 8.0 and 9.0",
    "shared_bytes": "of a multiprocessor, same table",
    "reserved_bytes": "of each program's shared memory for the system, same table",
    "warps": "of a multiprocessor, same table",
    "schedulers": "of a multiprocessor, each starts one instruction of a warp a cycle",
    "half_rate_cycles": "comparisons, integers, conversions: 64 lanes a cycle and multiprocessor (throughput table)",
    "exponential_cycles": "16 lanes a cycle and multiprocessor (throughput table)",
    "operations_per_s": "a large bfloat16 product of random data in torch, as benchmarks/roofline.py has it",
    "warp_products_share": "mma.sync reaches 62.9 % of wgmma's rate on Hopper (arXiv 2402.13499); an A100 has no wgmma",
    "shared_bytes_per_cycle": "32 banks of 4 bytes",
    "l2_bytes": "what torch reports for an H200; 50 MB of an H100, 40 MB of an A100 (data sheets)",
    "l2_bytes_per_s": "H100: 5.6 TB/s measured (Chips and Cheese, 2023); A100: the same share of 5120 bytes a cycle",
    "l2_latency_cycles": "of a hit: measured 220 to 340 on GPUs of the same family",
    "load_bytes_per_cycle": "that one multiprocessor takes from L2 while others compute (A100 white paper)",
    "memory_bytes_per_s": "a copy in torch, as benchmarks/roofline.py has it",
    "memory_latency_cycles": "of a miss, about twice a hit's",
    "slowdown": "fitted to the published times in benchmarks/results/calibration.json, see calibration.py",
    "torch_operation_us": "of a small operation on the host with its launch: 4 to 6 us in eager mode",
    "kernel_launch_us": "of a Triton kernel with some forty arguments from Python",
    "own_operator_us": "a torch.library.custom_op around kernels, written in Python",
    "small_kernel_us": "least time of a kernel on the device with the gap behind it",
}
H200 = Constants()
H100 = replace(H200, l2_bytes=50e6, memory_bytes_per_s=3.0e12)
A100 = replace(
    H200,
    capability=80,
    multiprocessors=108,
    clock_hz=1.41e9,
    shared_bytes=164 * 1024,
    operations_per_s=280e12,
    warp_products_share=1.0,
    l2_bytes=40e6,
    l2_bytes_per_s=4.5e12,
    memory_bytes_per_s=1.8e12,
    slowdown=1.21,
)
GPUS = {"A100": A100, "H100": H100, "H200": H200}
STATIONS = ("tensor", "issue", "shared", "l2", "memory")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted execution time of a kernel, in total and for each hardware unit.

    `waiting_ms` is the part of the time that the busiest unit does not explain.
    """

    ms: float
    tensor_ms: float
    issue_ms: float
    shared_ms: float
    l2_ms: float
    memory_ms: float
    waiting_ms: float
    programs_at_once: int  # programs on one multiprocessor at the same time

    @property
    def limit(self) -> str:
        """Return the name of the hardware unit that limits the kernel's speed, or "latency"."""
        busiest = max(STATIONS, key=lambda name: getattr(self, f"{name}_ms"))
        return "latency" if self.waiting_ms > getattr(self, f"{busiest}_ms") else busiest


def predict(kernel: Mapping[str, Any], work: Mapping[str, Any], constants: Constants) -> Prediction:
    """Return the predicted execution time of a kernel.

    `kernel` is a result of kernel_model.code_row, and `work` is a kernel_work.Work as a dict.
    """
    at_once = programs_at_once(kernel["registers"], kernel["shared_bytes"], kernel["warps"], constants)
    outside, passes = _outside(kernel, work, constants), work["passes"]
    step = _step(kernel, work, constants, at_once) if passes else Cycles({}, 0.0)
    of_pass = constants.slowdown * step.cycles_per_pass(at_once)
    of_program = outside.cycles_per_pass(at_once)
    programs = max(1, work["programs"])
    slots = constants.multiprocessors
    each = passes / programs * of_pass + of_program  # cycles of one program
    together = programs * each / slots + each * at_once / 2  # half of the last wave of programs is lost
    longest = work["longest"] * constants.slowdown * step.cycles_per_pass(1) + outside.cycles_per_pass(1)
    seconds = max(max(together if programs > slots * at_once else 0, longest) / constants.clock_hz, 0)
    alone = {
        name: (passes * step.stations.get(name, 0) + programs * outside.stations.get(name, 0))
        / slots
        / constants.clock_hz
        for name in STATIONS
    }
    least = max(alone.values())
    seconds = max(seconds, least, constants.small_kernel_us * 1e-6)
    return Prediction(
        ms=1e3 * seconds,
        waiting_ms=1e3 * (seconds - least),
        programs_at_once=at_once,
        **{f"{name}_ms": 1e3 * value for name, value in alone.items()},
    )


def programs_at_once(registers: int, shared_bytes: int, warps: int, constants: Constants = H200) -> int:
    """Return the number of programs (thread blocks) that fit on one multiprocessor at the same time."""
    of_warp = -(-max(registers, 24) * 32 // 256) * 256
    by_shared = constants.shared_bytes // (shared_bytes + constants.reserved_bytes)
    return max(1, min(constants.registers // of_warp // warps, by_shared, constants.warps // warps, 32))


@dataclass(frozen=True)
class Cycles:
    """The number of clock cycles that a part of a kernel needs on one multiprocessor."""

    stations: dict[str, float]  # busy cycles of each station
    alone: float  # cycles if only one program runs

    def cycles_per_pass(self, at_once: int) -> float:
        """Return the clock cycles per loop pass if `at_once` programs share the multiprocessor."""
        busiest = max((cycles for name, cycles in self.stations.items() if name != "memory"), default=0.0)
        return busiest + max(0.0, self.alone - busiest) / at_once


def _step(kernel: Mapping[str, Any], work: Mapping[str, Any], constants: Constants, at_once: int) -> Cycles:
    always, warps = kernel["loop"], kernel["warps"]
    count = _counts_of_pass(kernel, work)
    loaded_bytes = count["global_read_bytes"] * warps + kernel["described_bytes"]
    # An atomic addition is counted as the transfer of its bytes. The L2 cache computes it.
    added_bytes = count["global_written_bytes"] * warps + kernel.get("reduced_bytes", 0)
    missed_bytes = _missed_bytes(work, loaded_bytes, at_once, constants) + work.get("sum_bytes", 0)
    products = _product_cycles(always["mma"], warps, constants)
    issue = _issue_cycles(count, warps, constants)
    per_cycle = constants.multiprocessors * constants.clock_hz
    stations = {
        "tensor": products,
        "issue": issue,
        "shared": _shared_bytes(count) * warps / constants.shared_bytes_per_cycle,
        "l2": (loaded_bytes + added_bytes) * per_cycle / constants.l2_bytes_per_s,
        "memory": missed_bytes / work["passes"] * per_cycle / constants.memory_bytes_per_s,
    }
    # Copies by descriptor are not simulated. They are issued (stages - 1) passes ahead, the last of which is the wait.
    alone = _scheduled_cycles(kernel, work)
    described_bytes = kernel["described_bytes"]
    latency = constants.l2_latency_cycles + described_bytes / constants.load_bytes_per_cycle if described_bytes else 0.0
    return Cycles(stations, max(alone, latency - max(0, kernel["stages"] - 2) * alone))


def _scheduled_cycles(kernel: Mapping[str, Any], work: Mapping[str, Any]) -> float:
    """Return the average cycles of a pass of a program that runs alone, as simulated by warp_schedule.py."""
    at_edges = work.get("edges", 0) / work["passes"] if kernel.get("edge_loop") else 0.0

    def average(prefix: str) -> float:
        always, everything = (kernel[f"{prefix}{name}_cycles"] for name in ("always", "all"))
        return float(always + work["conditional"] * (everything - always))

    return (1 - at_edges) * average("") + (at_edges * average("edge_") if at_edges else 0.0)


def _counts_of_pass(kernel: Mapping[str, Any], work: Mapping[str, Any]) -> dict[str, float]:
    """Return the average instruction counts for one pass through a kernel's main loop."""
    regions = [(kernel["loop"], kernel["conditional"])] * 2
    if kernel.get("edge_loop"):
        regions[1] = (kernel["edge_loop"], kernel["edge_conditional"])
    at_edges = work.get("edges", 0) / work["passes"]
    total: dict[str, float] = {}
    for share, (always, conditional) in zip((1 - at_edges, at_edges), regions, strict=True):
        for name in always.keys() - {"mma"}:
            count = always[name] + work["conditional"] * conditional.get(name, 0)
            total[name] = total.get(name, 0.0) + share * count
    return total


def _outside(kernel: Mapping[str, Any], work: Mapping[str, Any], constants: Constants) -> Cycles:
    """Return the clock cycles that a program spends before and after its main loop."""
    moved_bytes = work["own_bytes"] / max(1, work["programs"])
    per_cycle = constants.multiprocessors * constants.clock_hz
    issue = kernel["outside_instructions"] * kernel["warps"] / constants.schedulers
    stations = {
        "issue": issue,
        "l2": moved_bytes * per_cycle / constants.l2_bytes_per_s,
        "memory": moved_bytes * per_cycle / constants.memory_bytes_per_s,
    }
    return Cycles(stations, issue + 2 * constants.memory_latency_cycles + moved_bytes / constants.load_bytes_per_cycle)


def _missed_bytes(work: Mapping[str, Any], loaded_bytes: float, at_once: int, constants: Constants) -> float:
    """Return the number of bytes that must be read from memory because the L2 cache does not hold them.

    The first read of each byte always counts. Other reads count in part if the data in use exceed the L2 cache.
    """
    requested = loaded_bytes * work["passes"]
    compulsory = min(requested, work["walked_bytes"] * work["reads"])
    in_use = min(work["walked_bytes"], work["spread_bytes"] * constants.multiprocessors * at_once)
    missing = max(0.0, 1 - constants.l2_bytes / in_use) if in_use else 0.0
    return compulsory + (requested - compulsory) * missing


def _product_cycles(mma: Mapping[str, int], warps: int, constants: Constants) -> float:
    """Return the clock cycles that a multiprocessor needs for the matrix product instructions `mma`."""
    rate = constants.operations_per_s / constants.multiprocessors / constants.clock_hz
    total = 0.0
    for name, number in mma.items():
        share = 1.0 if name.split(".")[0].endswith("GMMA") else constants.warp_products_share
        operations = mma_operations(name.partition(":")[0]) / (rate * share)
        total += number * warps * max(operations, operand_bytes(name) / constants.shared_bytes_per_cycle)
    return total


def _shared_bytes(count: Mapping[str, float]) -> float:
    """Return the number of bytes that one warp moves through shared memory."""
    return count["shared_bytes"] + count["mma_shared_bytes"] + count["spills"] * LANES * 4


def _issue_cycles(count: Mapping[str, float], warps: int, constants: Constants) -> float:
    slots = max(
        count["instructions"],
        constants.half_rate_cycles * count["half_rate"],
        constants.exponential_cycles * count["exponentials"],
    )
    return slots * warps / constants.schedulers


SORT_PASSES = 8  # passes of torch's radix sort over 64-bit keys, 8 bits each


def torch_ms(operations: Mapping[str, Any], constants: Constants) -> float:
    """Return the predicted device time, in milliseconds, of the torch operations outside the Triton kernels.

    `operations` is a result of host_cost.host_cost for one direction.
    """
    total = 0.0
    for name, (count, moved_bytes) in operations["by_name"].items():
        passes = SORT_PASSES if name == "aten::sort" else 1
        total += max(count * constants.small_kernel_us * 1e-6, moved_bytes * passes / constants.memory_bytes_per_s)
    return 1e3 * total


def host_ms(operations: Mapping[str, Any], constants: Constants) -> float:
    """Return the time, in milliseconds, that the host needs to launch all operations of one pass."""
    launches = operations["launches"] * constants.kernel_launch_us
    around = operations["own_operators"] * constants.own_operator_us
    return 1e-3 * (launches + around + operations["operations"] * constants.torch_operation_us)
