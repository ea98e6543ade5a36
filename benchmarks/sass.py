"""What a kernel's machine code does: its loops, and what one pass through a loop costs a warp.

Input is what `nvdisasm -c` prints. A loop is what a backward branch closes: all blocks from which the branch is reached
without passing the loop's head. An instruction that not every pass executes, since a branch leads around it, counts
apart (`conditional`). Where both ends of a predicated branch lie in the loop, both count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

LANES = 32  # threads of a warp
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_WAIT = re.compile(r"(WARPGROUP\.)?DEPBAR|SYNCS.*TRYWAIT")
_SPIN = re.compile(r"SYNCS.*TRYWAIT|UTCATOMSWS")
_SPIN_LENGTH = 8
_JUMPS = ("BRA", "JMP", "BRX", "JMX")
_ENDS = ("EXIT", "RET", "KILL", "BRX", "JMX")


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # "" where it is always executed
    opcode: str  # with its modifiers: "HGMMA.64x64x16.F32.BF16"
    operands: str
    target: int | None = None  # where a branch leads

    @property
    def name(self) -> str:
        return self.opcode.split(".", 1)[0]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One pass through some instructions by one warp; bytes are those of all its lanes."""

    instructions: int
    mma: dict[str, int]  # by the opcode with its shape; ":SS" where both factors of a warpgroup lie in shared memory
    mma_operations: int  # of one warp: a quarter of what a group of four multiplies together counts for each of them
    half_rate: int  # comparisons, integers, conversions: a scheduler starts one every other cycle
    exponentials: int  # and what else runs where they do: logarithms, reciprocals
    global_read_bytes: int
    global_written_bytes: int
    shared_bytes: int  # by loads and stores of the warp, not what tensor cores read there
    mma_shared_bytes: int  # operands that tensor cores read from shared memory, a quarter for each of four warps
    bulk_copies: int  # by descriptor: their bytes stand elsewhere
    barriers: int  # all warps of a program meet
    waits: int  # for copies or for tensor cores
    spills: int  # to and from local memory


@dataclass(frozen=True, kw_only=True)
class Loop:
    head: int
    latch: int
    always: Counts
    conditional: Counts
    is_innermost: bool

    @property
    def instructions(self) -> int:
        return self.always.instructions + self.conditional.instructions


def parse(text: str) -> list[Instruction]:
    """All instructions of the one function in `text`, in the order of their addresses."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found: list[tuple[re.Match[str], int]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _LINE.match(line):
            address = int(match[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            found.append((match, address))
    return [_instruction(match, address, labels) for match, address in found]


def _instruction(match: re.Match[str], address: int, labels: dict[str, int]) -> Instruction:
    _, predicate, opcode, operands = match.groups()
    jump = _TARGET.search(operands) if opcode.split(".")[0] in _JUMPS else None
    target = labels.get(jump[1]) if jump else None
    return Instruction(address, (predicate or "").strip(), opcode, operands.strip(), target)


def loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """Every loop, the longest first. None are a trap that jumps to itself, and a wait that asks again and again."""
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
    found = []
    for head, (body, _) in list(bodies.items()):
        inside = [one for block in body for one in blocks[block]]
        if len(inside) <= _SPIN_LENGTH and any(_SPIN.match(one.opcode) for one in inside):
            del bodies[head]
    for head, (body, latches) in bodies.items():
        every = set.intersection(*(dominators[latch] for latch in latches))
        inner = any(other != head and other in body for other in bodies)
        found.append(
            Loop(
                head=blocks[head][0].address,
                latch=max(blocks[latch][-1].address for latch in latches),
                always=count(one for block in sorted(body & every) for one in blocks[block]),
                conditional=count(one for block in sorted(body - every) for one in blocks[block]),
                is_innermost=not inner,
            )
        )
    return sorted(found, key=lambda loop: -loop.instructions)


def main_loop(found: Sequence[Loop]) -> Loop | None:
    """The innermost loop with the most products; without any, the longest innermost one.

    Of several with as many, the shortest: a walk in two parts, the longer of which masks, is short where it is often.
    """
    inner = [loop for loop in found if loop.is_innermost]

    def weight(loop: Loop) -> tuple[int, int]:
        products = loop.always.mma_operations
        return products, -loop.instructions if products else loop.instructions

    return max(inner, key=weight, default=None)


def edge_loop(found: Sequence[Loop]) -> Loop | None:
    """Of a walk in two parts the one that masks: the longest other loop with as many products as the main one."""
    main = main_loop(found)
    others = [
        loop
        for loop in found
        if loop.is_innermost and loop is not main and loop.always.mma_operations and main is not None
        if loop.always.mma_operations == main.always.mma_operations
    ]
    return max(others, key=lambda loop: loop.instructions, default=None)


def count(instructions: Iterable[Instruction]) -> Counts:
    names: Counter[str] = Counter()
    mma: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    total = 0
    for one in instructions:
        total += 1
        names[one.name] += 1
        if one.name in _PRODUCTS:
            mma[one.opcode + (":SS" if _left_is_shared(one) else "")] += 1
        if operations := mma_operations(one.opcode):
            sums["operations"] += operations
            sums["operands"] += _shared_operand_bytes(one)
        sums["waits"] += bool(_WAIT.match(one.opcode))
        for kind, pattern, size in _MEMORY:
            if pattern.match(one.opcode):
                sums[kind] += size(one.opcode) * LANES
    return Counts(
        instructions=total,
        mma=dict(mma),
        mma_operations=sums["operations"],
        half_rate=sum(names[name] for name in _HALF_RATE),
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


_HALF_RATE = (
    *("ISETP", "FSETP", "PLOP3", "FMNMX", "VIMNMX", "IMNMX", "FSEL", "SEL", "IADD3", "IADD", "VIADD", "IABS"),
    *("LOP3", "SHF", "LEA", "PRMT", "F2FP", "BMSK", "SGXT", "FMNMX3"),
)
_PRODUCTS = ("HMMA", "DMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA")
_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "16832": (16, 8, 32), "884": (8, 8, 4)}


def mma_operations(opcode: str) -> int:
    """Multiplications and additions of one warp; 0 for what is no product of tiles, or has its shape elsewhere."""
    name, *modifiers = opcode.split(".")
    if name == "HGMMA" or name == "QGMMA":
        rows, columns, depth = map(int, modifiers[0].split("x"))
        return 2 * rows * columns * depth // 4
    if name in ("HMMA", "DMMA", "IMMA", "QMMA") and modifiers[0] in _SHAPES:
        rows, columns, depth = _SHAPES[modifiers[0]]
        return 2 * rows * columns * depth
    return 0


def _shared_operand_bytes(one: Instruction) -> int:
    """Of a warpgroup's product: the right factor lies in shared memory, and the left one unless it has a register."""
    return operand_bytes(one.opcode + (":SS" if _left_is_shared(one) else ""))


def operand_bytes(product: str) -> int:
    """A warp's quarter of what a warpgroup's product, by its name in `Counts.mma`, reads in shared memory."""
    opcode, _, both = product.partition(":")
    if not opcode.split(".")[0].endswith("GMMA"):
        return 0
    rows, columns, depth = map(int, opcode.split(".")[1].split("x"))
    return ((rows * depth if both else 0) + columns * depth) * (1 if opcode.startswith("Q") else 2) // 4


def _left_is_shared(one: Instruction) -> bool:
    return one.name.endswith("GMMA") and one.operands.split(",")[1].strip().startswith("gdesc")


def _width(opcode: str) -> int:
    """Bytes of one lane."""
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "32": 4}
    return next((sizes[word] for word in opcode.split(".")[1:] if word in sizes), 4)


def _matrices(opcode: str) -> int:
    """Of LDSM and STSM, which move matrices of 8 x 8 halves: a row of 16 bytes a lane if there are four of them."""
    last = opcode.split(".")[-1]
    return 4 * int(last) if last.isdigit() and int(last) <= 4 else 4


_MEMORY: tuple[tuple[str, re.Pattern[str], Callable[[str], int]], ...] = (
    ("read", re.compile(r"LDG(STS)?\."), _width),
    ("written", re.compile(r"(STG|RED|ATOMG)\b"), _width),
    ("shared", re.compile(r"(LDS|STS|LDGSTS|ATOMS)\b"), _width),
    ("shared", re.compile(r"(LDSM|STSM)\b"), _matrices),
)


def _blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    targets = {one.target for one in instructions}
    blocks: list[list[Instruction]] = [[]]
    for one in instructions:
        if blocks[-1] and (one.address in targets or _ends_block(blocks[-1][-1])):
            blocks.append([])
        blocks[-1].append(one)
    return blocks


def _ends_block(one: Instruction) -> bool:
    return one.target is not None or one.name in _ENDS


def _successors(blocks: Sequence[Sequence[Instruction]]) -> list[list[int]]:
    at = {block[0].address: number for number, block in enumerate(blocks) if block}
    result = []
    for number, block in enumerate(blocks):
        last = block[-1]
        next_ones = [at[last.target]] if last.target is not None else []
        falls_through = bool(last.predicate) or not _ends_block(last) or (".U" in last.opcode and "UP" in last.operands)
        if falls_through and number + 1 < len(blocks):
            next_ones.append(number + 1)
        result.append(next_ones)
    return result


def _dominators(successors: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each block those that every way from the entry to it passes. Blocks that no way leads to have all."""
    blocks = range(len(successors))
    before: list[list[int]] = [[] for _ in blocks]
    for number, after in enumerate(successors):
        for one in after:
            before[one].append(number)
    result = [{0} if number == 0 else set(blocks) for number in blocks]
    changed = True
    while changed:
        changed = False
        for number in blocks[1:]:
            new = {number} | (set.intersection(*(result[one] for one in before[number])) if before[number] else set())
            changed |= new != result[number]
            result[number] = new
    return result


def _reaching(latch: int, head: int, successors: Sequence[Sequence[int]]) -> set[int]:
    body, todo = {head}, [latch]
    while todo:
        one = todo.pop()
        if one not in body:
            body.add(one)
            todo += [number for number, after in enumerate(successors) if one in after]
    return body
