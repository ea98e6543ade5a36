"""Analyse the machine code (SASS) of a GPU kernel, in particular its loops.

The input is the output of `nvdisasm -c -hex`. A loop consists of all basic blocks from which its backward branch can be
reached without passing the loop's head. Instructions that not every pass executes, because a branch skips them, are
counted separately (`conditional`). If both targets of a predicated branch are in the loop, both are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

LANES = 32  # threads per warp
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_\w+):")
_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_NO_SCOREBOARD = 7
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_WAIT = re.compile(r"(WARPGROUP\.)?DEPBAR|SYNCS.*TRYWAIT")
_SPIN = re.compile(r"SYNCS.*TRYWAIT|UTCATOMSWS")
_SPIN_LENGTH = 8
_JUMPS = ("BRA", "JMP", "BRX", "JMX", "CALL")
# Taken only if the threads of a warp diverged, which they do not in the loops of these kernels.
_DIVERGED = "BRA.DIV"
_ENDS = ("EXIT", "RET", "KILL", "BRX", "JMX")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the compiler scheduled an instruction, as encoded in bits 105 to 121 of the instruction."""

    stall: int = 1  # cycles until the same warp's next instruction
    sets: int | None = None  # scoreboard that is set until the result is written
    releases: int | None = None  # scoreboard that is set until the operands are read
    waits: tuple[int, ...] = ()  # scoreboards that the instruction waits for


@dataclass(frozen=True)
class Instruction:
    """One machine instruction."""

    address: int
    predicate: str  # "" if the instruction is always executed
    opcode: str  # with its modifiers, for example "HGMMA.64x64x16.F32.BF16"
    operands: str
    target: int | None = None  # address of a branch's target, or None
    schedule: Schedule = Schedule()

    @property
    def name(self) -> str:
        """Return the opcode without its modifiers."""
        return self.opcode.split(".", 1)[0]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The work done by one warp to execute some instructions once.

    Bytes are summed over all lanes of the warp.
    """

    instructions: int
    mma: dict[str, int]  # matrix products by opcode and shape; ":SS" if both operands are in shared memory
    mma_operations: int  # operations of one warp; products of a warpgroup count a quarter for each of its four warps
    half_rate: int  # comparisons, integer operations, conversions: a scheduler starts one every other cycle
    exponentials: int  # also logarithms and reciprocals, which use the same unit
    global_read_bytes: int
    global_written_bytes: int
    shared_bytes: int  # loads and stores of the warp, without the operands of tensor cores
    mma_shared_bytes: int  # operands that tensor cores read from shared memory, a quarter for each of four warps
    bulk_copies: int  # copies by descriptor; CompiledKernel.described_bytes has their bytes
    barriers: int  # barriers for all warps of a program
    waits: int  # waits for copies or for tensor cores
    spills: int  # loads from and stores to local memory


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop in the machine code, with the counts of one iteration."""

    head: int  # address of its first instruction
    latch: int  # address of the branch back to the head
    always: Counts  # instructions that every pass executes
    conditional: Counts  # instructions that only some passes execute
    is_innermost: bool
    body: tuple[Instruction, ...] = field(default=(), repr=False)  # all of its instructions, in the order of addresses
    conditional_addresses: frozenset[int] = field(default=frozenset(), repr=False)

    @property
    def always_body(self) -> tuple[Instruction, ...]:
        """Return the instructions that every pass executes."""
        return tuple(instruction for instruction in self.body if instruction.address not in self.conditional_addresses)

    @property
    def instructions(self) -> int:
        """Return the number of instructions in the loop, including conditional ones."""
        return self.always.instructions + self.conditional.instructions


def parse(text: str) -> list[Instruction]:
    """Return the instructions in nvdisasm's output, which must contain exactly one function."""
    labels: dict[str, int] = {}
    pending_labels: list[str] = []
    matches: list[tuple[re.Match[str], int]] = []
    words: dict[int, list[int]] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            pending_labels.append(label[1])
            continue
        if match := _LINE.match(line):
            address = int(match[1], 16)
            labels |= dict.fromkeys(pending_labels, address)
            pending_labels.clear()
            matches.append((match, address))
        if matches and (word := _WORD.search(line)):
            words.setdefault(matches[-1][1], []).append(int(word[1], 16))
    return [_instruction(match, address, labels, words.get(address, [])) for match, address in matches]


def _instruction(match: re.Match[str], address: int, labels: dict[str, int], words: Sequence[int]) -> Instruction:
    _, predicate, opcode, operands = match.groups()
    is_jump = opcode.split(".")[0] in _JUMPS and not opcode.startswith(_DIVERGED)
    jump = _TARGET.search(operands) if is_jump else None
    target = labels.get(jump[1]) if jump else None
    schedule = _schedule(words[1]) if len(words) == 2 else Schedule()
    return Instruction(address, (predicate or "").strip(), opcode, operands.strip(), target, schedule)


def _schedule(upper_word: int) -> Schedule:
    """Return the schedule encoded in the upper 64 bits of an instruction."""
    bits = upper_word >> 41
    sets, releases, waits = bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
    return Schedule(
        stall=bits & 15,
        sets=None if sets == _NO_SCOREBOARD else sets,
        releases=None if releases == _NO_SCOREBOARD else releases,
        waits=tuple(number for number in range(6) if waits >> number & 1),
    )


def loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """Return all loops, longest first, without short spin loops."""
    blocks = _blocks(instructions)
    successors = _successors(blocks)
    dominators = _dominators(successors)
    bodies: dict[int, tuple[set[int], set[int]]] = {}
    for latch, heads in enumerate(successors):
        for head in heads:
            if head in dominators[latch] and not (head == latch and len(blocks[head]) == 1):
                body, latches = bodies.setdefault(head, (set(), set()))
                body |= _reaching(latch, head, successors)
                latches.add(latch)
    result = []
    for head, (body, _) in list(bodies.items()):
        inside = [instruction for block in body for instruction in blocks[block]]
        if len(inside) <= _SPIN_LENGTH and any(_SPIN.match(instruction.opcode) for instruction in inside):
            del bodies[head]
    for head, (body, latches) in bodies.items():
        always_executed = set.intersection(*(dominators[latch] for latch in latches))
        inner = any(other != head and other in body for other in bodies)
        result.append(
            Loop(
                head=blocks[head][0].address,
                latch=max(blocks[latch][-1].address for latch in latches),
                always=count(instruction for block in sorted(body & always_executed) for instruction in blocks[block]),
                conditional=count(
                    instruction for block in sorted(body - always_executed) for instruction in blocks[block]
                ),
                is_innermost=not inner,
                body=tuple(instruction for block in sorted(body) for instruction in blocks[block]),
                conditional_addresses=frozenset(
                    instruction.address for block in body - always_executed for instruction in blocks[block]
                ),
            )
        )
    return sorted(result, key=lambda loop: -loop.instructions)


def main_loop(all_loops: Sequence[Loop]) -> Loop | None:
    """Return the innermost loop with the most matrix products, or else the longest innermost loop.

    Of several loops with equally many products the shortest is returned. If a kernel has a loop with masks and one
    without, the one without masks is shorter and runs more often.
    """
    inner = [loop for loop in all_loops if loop.is_innermost]

    def weight(loop: Loop) -> tuple[int, int]:
        products = loop.always.mma_operations
        return products, -loop.instructions if products else loop.instructions

    return max(inner, key=weight, default=None)


def edge_loop(all_loops: Sequence[Loop]) -> Loop | None:
    """Return the loop with masks if the kernel has loops with and without masks, or else None.

    It is the longest other innermost loop with as many products as the main loop.
    """
    main = main_loop(all_loops)
    others = [
        loop
        for loop in all_loops
        if loop.is_innermost and loop is not main and loop.always.mma_operations and main is not None
        if loop.always.mma_operations == main.always.mma_operations
    ]
    return max(others, key=lambda loop: loop.instructions, default=None)


def count(instructions: Iterable[Instruction]) -> Counts:
    """Return the work done by one warp to execute `instructions` once."""
    names: Counter[str] = Counter()
    mma: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    total = 0
    for instruction in instructions:
        total += 1
        names[instruction.name] += 1
        if instruction.name in _PRODUCTS:
            mma[product_key(instruction)] += 1
        if operations := mma_operations(instruction.opcode):
            sums["operations"] += operations
            sums["operands"] += _shared_operand_bytes(instruction)
        sums["waits"] += bool(_WAIT.match(instruction.opcode))
        for kind, pattern, size in _MEMORY:
            if pattern.match(instruction.opcode):
                sums[kind] += size(instruction.opcode) * LANES
    return Counts(
        instructions=total,
        mma=dict(mma),
        mma_operations=sums["operations"],
        half_rate=sum(names[name] for name in HALF_RATE),
        exponentials=names["MUFU"],
        global_read_bytes=sums["read"],
        global_written_bytes=sums["written"],
        shared_bytes=sums["shared"],
        mma_shared_bytes=sums["operands"],
        bulk_copies=names["UTMALDG"] + names["UBLKCP"] + names["UTMASTG"] + names["UTMAREDG"],
        barriers=names["BAR"],
        waits=sums["waits"],
        spills=names["LDL"] + names["STL"],
    )


HALF_RATE = (
    *("ISETP", "FSETP", "PLOP3", "FMNMX", "VIMNMX", "IMNMX", "FSEL", "SEL", "IADD3", "IADD", "VIADD", "IABS"),
    *("LOP3", "SHF", "LEA", "PRMT", "F2FP", "BMSK", "SGXT", "FMNMX3"),
)
_PRODUCTS = ("HMMA", "DMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA")
_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "16832": (16, 8, 32), "884": (8, 8, 4)}


def mma_operations(opcode: str) -> int:
    """Return the number of arithmetic operations per warp in a matrix product instruction.

    Return 0 for other instructions, and for products whose shape is not part of the opcode.
    """
    name, *modifiers = opcode.split(".")
    if name == "HGMMA" or name == "QGMMA":
        rows, columns, depth = map(int, modifiers[0].split("x"))
        return 2 * rows * columns * depth // 4
    if name in ("HMMA", "DMMA", "IMMA", "QMMA") and modifiers[0] in _SHAPES:
        rows, columns, depth = _SHAPES[modifiers[0]]
        return 2 * rows * columns * depth
    return 0


def _shared_operand_bytes(instruction: Instruction) -> int:
    """Return the number of operand bytes that a matrix product reads from shared memory.

    The right operand of a warpgroup's product is always there, the left one unless it is in registers.
    """
    return operand_bytes(product_key(instruction))


def product_key(instruction: Instruction) -> str:
    """Return the key of a matrix product in `Counts.mma`."""
    return instruction.opcode + (":SS" if _left_is_shared(instruction) else "")


def operand_bytes(product: str) -> int:
    """Return the number of operand bytes per warp that a matrix product reads from shared memory.

    `product` is a key of `Counts.mma`.
    """
    opcode, _, both = product.partition(":")
    if not opcode.split(".")[0].endswith("GMMA"):
        return 0
    rows, columns, depth = map(int, opcode.split(".")[1].split("x"))
    return ((rows * depth if both else 0) + columns * depth) * (1 if opcode.startswith("Q") else 2) // 4


def _left_is_shared(instruction: Instruction) -> bool:
    return instruction.name.endswith("GMMA") and instruction.operands.split(",")[1].strip().startswith("gdesc")


def lane_bytes(opcode: str) -> int:
    """Return the number of bytes that a load or store moves for each lane (thread)."""
    return _matrices(opcode) if opcode.startswith(("LDSM", "STSM")) else _width(opcode)


def _width(opcode: str) -> int:
    """Return the number of bytes that a memory instruction moves for each lane (thread)."""
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "32": 4}
    return next((sizes[word] for word in opcode.split(".")[1:] if word in sizes), 4)


def _matrices(opcode: str) -> int:
    """Return the number of bytes that an LDSM or STSM instruction moves for each lane (thread)."""
    last = opcode.split(".")[-1]
    return 4 * int(last) if last.isdigit() and int(last) <= 4 else 4


_MEMORY: tuple[tuple[str, re.Pattern[str], Callable[[str], int]], ...] = (
    ("read", re.compile(r"LDG(STS)?\."), _width),
    ("written", re.compile(r"(STG|RED|ATOMG)\b"), _width),
    ("shared", re.compile(r"(LDS|STS|LDGSTS|ATOMS)\b"), _width),
    ("shared", re.compile(r"(LDSM|STSM)\b"), _matrices),
)


def _blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    targets = {instruction.target for instruction in instructions}
    blocks: list[list[Instruction]] = [[]]
    for instruction in instructions:
        if blocks[-1] and (instruction.address in targets or _ends_block(blocks[-1][-1])):
            blocks.append([])
        blocks[-1].append(instruction)
    return blocks


def _ends_block(instruction: Instruction) -> bool:
    return instruction.target is not None or instruction.name in _ENDS


def _successors(blocks: Sequence[Sequence[Instruction]]) -> list[list[int]]:
    """Return the blocks that may follow each basic block. Blocks that the entry does not reach have none."""
    at = {block[0].address: number for number, block in enumerate(blocks) if block}
    result = []
    for number, block in enumerate(blocks):
        last = block[-1]
        targets = [at[last.target]] if last.target is not None else []
        # For sm_80, a predicated CALL.REL.NOINC is a branch out of a loop; any other call returns.
        falls_through = bool(last.predicate) or not _ends_block(last) or last.name == "CALL"
        falls_through = falls_through or (".U" in last.opcode and "UP" in last.operands)
        if falls_through and number + 1 < len(blocks):
            targets.append(number + 1)
        result.append(targets)
    reachable, pending = set[int](), [0]
    while pending:
        number = pending.pop()
        if number not in reachable:
            reachable.add(number)
            pending += result[number]
    return [targets if number in reachable else [] for number, targets in enumerate(result)]


def _dominators(successors: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return the set of dominators of each basic block.

    These are the blocks on every path from the entry to it. Unreachable blocks are dominated by all blocks.
    """
    blocks = range(len(successors))
    before: list[list[int]] = [[] for _ in blocks]
    for number, after in enumerate(successors):
        for successor in after:
            before[successor].append(number)
    result = [{0} if number == 0 else set(blocks) for number in blocks]
    has_changed = True
    while has_changed:
        has_changed = False
        for number in blocks[1:]:
            new = {number} | (
                set.intersection(*(result[block] for block in before[number])) if before[number] else set(blocks)
            )
            has_changed |= new != result[number]
            result[number] = new
    return result


def _reaching(latch: int, head: int, successors: Sequence[Sequence[int]]) -> set[int]:
    body, pending = {head}, [latch]
    while pending:
        block = pending.pop()
        if block not in body:
            body.add(block)
            pending += [number for number, after in enumerate(successors) if block in after]
    return body
