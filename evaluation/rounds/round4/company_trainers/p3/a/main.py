"""stoker smoke job: train, stop, resume, finish.  torchrun --standalone --nproc-per-node=2 main.py"""
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist

from stoker.engine import Engine, Settings
from stoker.signals import ProcessSignals


def shared_dir():
    holder = [tempfile.mkdtemp(prefix="stoker_") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def main():
    dist.init_process_group("gloo")
    signals = ProcessSignals().install()
    root = shared_dir()

    first = Engine(Settings(total_steps=30), root, signals)
    first.fit()
    first.close()

    # second leg: fresh objects, everything comes from the files
    second = Engine(Settings(total_steps=55), root, signals)
    second.resume()
    assert second.step == first.step, (second.step, first.step)
    second.fit()
    second.close()

    loss = second.evaluate()
    if dist.get_rank() == 0:
        print(f"finished at step {second.step}, val {loss:.4f}, files {sorted(os.listdir(root))}")
        shutil.rmtree(root)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
