"""Simulate how the warps of a multiprocessor issue the instructions of a loop.

The compiler schedules a warp's instructions itself and encodes the schedule in them: after how many cycles the next
instruction may follow, and which scoreboards an instruction sets, releases and waits for. The simulation obeys this
schedule. It needs only the latency of instructions with a scoreboard, and how long each instruction occupies its unit.
So the overlap of the warps follows from the code and is no assumption.

One of the four schedulers is simulated, with its share of the warps of one program. The other three do the same. Loads
arrive after a fixed latency: the limits of the L2 cache and of memory are not part of the simulation. Bank conflicts
are not known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.sass import HALF_RATE, Instruction, lane_bytes, mma_operations, operand_bytes, product_key

SCHEDULERS = 4
SHARED_BYTES_PER_CYCLE = 128 // SCHEDULERS
PASSES, WARM_PASSES = 10, 4


@dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """The rates and latencies of a multiprocessor, in cycles. `SOURCES` says where they come from."""

    mma_operations_per_cycle: int  # of the tensor core of one scheduler
    warp_product_share: float  # of this rate for products of a single warp (mma.sync)
    float_cycles: int  # that an addition, multiplication or fused multiply-add of a warp occupies its unit
    half_rate_cycles: int = 2
    exponential_cycles: int = 8
    global_latency: int = 270
    shared_latency: int = 30
    shuffle_latency: int = 24
    exponential_latency: int = 22
    other_latency: int = 20
    read_latency: int = 12  # until an operand of a load or store is read and its register can be overwritten
    barrier_latency: int = 25
    product_latency: int = 30  # from the last operation of a warpgroup's product to its result


MULTIPROCESSORS = {
    80: Multiprocessor(mma_operations_per_cycle=512, warp_product_share=1.0, float_cycles=2),
    90: Multiprocessor(mma_operations_per_cycle=1024, warp_product_share=0.63, float_cycles=1),
}
SOURCES = {
    "mma_operations_per_cycle": "dense bfloat16: 312 TFLOP/s of 108 multiprocessors at 1.41 GHz (A100), 989 of 132 at "
    "1.83 GHz (H100), data sheets",
    "warp_product_share": "mma.sync reaches 62.9 % of wgmma's rate on Hopper (arXiv 2402.13499)",
    "float_cycles": "64 lanes a cycle for compute capability 8.0, 128 for 9.0 (CUDA programming guide, throughput)",
    "half_rate_cycles": "64 lanes a cycle for comparisons, integers, conversions (same table)",
    "exponential_cycles": "16 lanes a cycle (same table)",
    "global_latency": "of an L2 hit: measured 200 to 340 on these GPUs",
    "shared_latency": "29 to 33 measured on A100 and H100 (arXiv 2402.13499)",
    "shuffle_latency": "23 to 25 measured since Volta",
    "exponential_latency": "18 to 40 measured since Volta, depending on the result's conversion",
    "other_latency": "conversions and special registers, order of magnitude",
    "read_latency": "order of magnitude",
    "barrier_latency": "from the last warp's arrival, order of magnitude",
    "product_latency": "order of magnitude, from wgmma latencies of arXiv 2402.13499",
}
_FLOATS = ("FFMA", "FADD", "FMUL", "FFMA2", "HFMA2", "FSWZADD")
_SHARED = ("LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS")


@dataclass
class _Unit:
    free: float = 0.0


@dataclass
class _Warp:
    """The state of one warp."""

    time: float = 0.0  # earliest issue of its next instruction
    place: int = 0
    passes: int = 0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 6)
    copies: deque[float] = field(default_factory=deque)  # when each group of copies arrives
    pending_copies: float = 0.0
    products: deque[float] = field(default_factory=deque)  # when each group of a warpgroup's products finishes
    pending_products: float = 0.0
    at_barrier: bool = False
    finished: list[float] = field(default_factory=list)


def cycles_per_pass(instructions: Sequence[Instruction], warps: int, capability: int) -> float:
    """Return the cycles that a program of `warps` warps, running alone, needs for a pass through a loop."""
    if not instructions:
        return 0.0
    return _Simulation(instructions, -(-warps // SCHEDULERS), MULTIPROCESSORS[capability]).run()


class _Simulation:
    def __init__(self, instructions: Sequence[Instruction], warps: int, processor: Multiprocessor) -> None:
        self.instructions, self.processor = instructions, processor
        self.warps = [_Warp() for _ in range(warps)]
        self.issue_free = 0.0
        self.units = {name: _Unit() for name in ("tensor", "float", "half", "exponential", "shared")}

    def run(self) -> float:
        """Return the cycles per pass after the first passes, in which the loads' pipeline fills."""
        while active := [warp for warp in self.warps if not warp.at_barrier and warp.passes < PASSES]:
            warp = min(active, key=lambda warp: max(self._earliest(warp), self.issue_free))
            self._issue(warp)
        # The warps meet at barriers, so each of them needs the same time for a pass.
        spans = [warp.finished[-1] - warp.finished[WARM_PASSES - 1] for warp in self.warps]
        return sum(spans) / len(spans) / (PASSES - WARM_PASSES)

    def _earliest(self, warp: _Warp) -> float:
        instruction = self.instructions[warp.place]
        time = max([warp.time, *(warp.scoreboards[number] for number in instruction.schedule.waits)])
        if (unit := self._unit(instruction)) is not None:
            time = max(time, unit.free)
        return time

    def _unit(self, instruction: Instruction) -> _Unit | None:
        name = instruction.name
        if mma_operations(instruction.opcode):
            # A warpgroup's product is queued: the warp does not wait for the tensor core.
            return None if name.endswith("GMMA") else self.units["tensor"]
        if name in _FLOATS:
            return self.units["float"]
        if name == "MUFU":
            return self.units["exponential"]
        if name in _SHARED or name == "SHFL":
            return self.units["shared"]
        return self.units["half"] if name in HALF_RATE else None

    def _occupied(self, instruction: Instruction) -> float:
        """Return for how many cycles an instruction occupies its unit."""
        name, processor = instruction.name, self.processor
        if operations := mma_operations(instruction.opcode):
            share = 1.0 if name.endswith("GMMA") else processor.warp_product_share
            operands = operand_bytes(product_key(instruction)) / SHARED_BYTES_PER_CYCLE
            return max(operations / (processor.mma_operations_per_cycle * share), operands)
        if name in _FLOATS:
            return processor.float_cycles
        if name == "MUFU":
            return processor.exponential_cycles
        if name == "SHFL":
            return SCHEDULERS
        if name in _SHARED:
            return 32 * lane_bytes(instruction.opcode) / SHARED_BYTES_PER_CYCLE
        return processor.half_rate_cycles

    def _issue(self, warp: _Warp) -> None:
        instruction = self.instructions[warp.place]
        schedule, processor = instruction.schedule, self.processor
        time = max(self._earliest(warp), self.issue_free)
        self.issue_free = time + 1
        if (unit := self._unit(instruction)) is not None:
            unit.free = time + self._occupied(instruction)
        warp.time = time + max(1, schedule.stall)
        name = instruction.name
        if name.endswith("GMMA"):
            tensor = self.units["tensor"]
            tensor.free = max(tensor.free, time) + self._occupied(instruction)
            warp.pending_products = tensor.free + processor.product_latency
            if "gsb" in instruction.operands:
                warp.products.append(warp.pending_products)
        elif instruction.opcode.startswith("WARPGROUP.DEPBAR"):
            warp.time = max(warp.time, _finish_all_but(warp.products, instruction))
        elif name == "LDGSTS":
            warp.pending_copies = time + processor.global_latency
        elif name == "LDGDEPBAR":
            warp.copies.append(warp.pending_copies)
        elif name == "DEPBAR":
            warp.time = max(warp.time, _finish_all_but(warp.copies, instruction))
        if schedule.sets is not None:
            ready = time + self._latency(name)
            warp.scoreboards[schedule.sets] = max(warp.scoreboards[schedule.sets], ready)
        if schedule.releases is not None:
            ready = time + processor.read_latency
            warp.scoreboards[schedule.releases] = max(warp.scoreboards[schedule.releases], ready)
        warp.place += 1
        if warp.place == len(self.instructions):
            warp.place, warp.passes = 0, warp.passes + 1
            warp.finished.append(warp.time)
        if name == "BAR":
            self._wait_at_barrier(warp)

    def _latency(self, name: str) -> float:
        processor = self.processor
        known = {
            "LDG": processor.global_latency,
            "SHFL": processor.shuffle_latency,
            "MUFU": processor.exponential_latency,
        }
        return known.get(name, processor.shared_latency if name in _SHARED else processor.other_latency)

    def _wait_at_barrier(self, warp: _Warp) -> None:
        warp.at_barrier = True
        if all(other.at_barrier or other.passes == PASSES for other in self.warps):
            release = max(other.time for other in self.warps) + self.processor.barrier_latency
            for other in self.warps:
                other.at_barrier, other.time = False, max(other.time, release)


def _finish_all_but(groups: deque[float], instruction: Instruction) -> float:
    """Remove the groups that the instruction waits for, and return when the last of them finishes."""
    remaining = int(instruction.operands.rsplit(",", 1)[-1].strip().split()[0].rstrip("}"), 0)
    time = 0.0
    while len(groups) > remaining:
        time = max(time, groups.popleft())
    return time
