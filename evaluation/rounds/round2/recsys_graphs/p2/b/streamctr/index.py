"""Index of a folder of logs: where each block of lines begins."""
import os
from typing import List, NamedTuple


class Block(NamedTuple):
    path: str
    offset: int
    lines: int


class LogIndex:
    def __init__(self, blocks: List[Block], n_files: int):
        self.blocks = blocks
        self.n_files = n_files

    @classmethod
    def scan(cls, root, block_lines):
        names = sorted(n for n in os.listdir(root) if n.endswith(".tsv"))
        blocks = []
        for name in names:
            blocks.extend(cls._scan_file(os.path.join(root, name), block_lines))
        return cls(blocks, len(names))

    @staticmethod
    def _scan_file(path, block_lines):
        found, start, pos, n = [], 0, 0, 0
        with open(path, "rb") as f:
            for line in f:
                pos += len(line)
                n += 1
                if n == block_lines:
                    found.append(Block(path, start, n))
                    start, n = pos, 0
        if n:
            found.append(Block(path, start, n))
        return found
