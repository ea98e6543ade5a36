from datetime import datetime

import torch.distributed as dist


def make_run_dir(root, rank):
    """runs/<date>_<time>: a fresh folder for each launch."""
    name = [datetime.now().strftime("%Y%m%d_%H%M%S_%f")]
    dist.broadcast_object_list(name, src=0)
    path = root / name[0]
    path.mkdir(parents=True, exist_ok=True)
    return path
