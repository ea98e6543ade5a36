from dataclasses import dataclass


@dataclass
class SFTConfig:
    vocab_size: int = 128
    hidden: int = 48
    block_size: int = 64
    conversations: int = 600
    micro_batch: int = 4
    epochs: int = 2
    lr: float = 3e-3
    warmup: int = 10
    clip: float = 1.0
    log_every: int = 15
    seed: int = 17
