"""LoRA finetune from a config.  torchrun --standalone --nproc-per-node=2 finetune.py"""
import json
import os
import tempfile

import torch.distributed as dist

from engine import Engine


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "finetune.json")) as f:
        cfg = json.load(f)
    dist.init_process_group("gloo")
    engine = Engine(cfg)
    engine.setup()
    engine.fit()
    val = engine.validate()
    with tempfile.TemporaryDirectory(prefix="finetune-") as out:
        bundle = engine.export(os.path.join(out, "adapter.pt"))
        engine.say(f"val {val:.4f}, exported {len(bundle['adapter'])} adapter tensors at step {bundle['step']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
