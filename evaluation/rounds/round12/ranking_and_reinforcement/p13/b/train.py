import torch.distributed as dist

import vlm.data  # noqa: F401
import vlm.hooks  # noqa: F401
import vlm.model  # noqa: F401
from config import CFG
from vlm.runner import Runner


def main():
    dist.init_process_group("gloo")
    runner = Runner(CFG)
    runner.run()
    value = runner.recall()
    if runner.rank == 0:
        print(f"recall@1 {value:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
