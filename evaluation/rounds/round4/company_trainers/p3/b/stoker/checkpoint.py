"""Checkpoint files: packed in a helper process, rotated, found again on resume."""
import io
import multiprocessing
import os
import re
import time
import zlib

import torch
import torch.distributed as dist

_NAME = re.compile(r"ckpt-(\d+)\.ptz$")


def _pack(raw, path):
    tmp = f"{path}.part"
    with open(tmp, "wb") as f:
        f.write(zlib.compress(raw, 3))
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, path)


class Heartbeat:
    """Touches a file that the node agent looks at; a stale one gets the job requeued."""

    def __init__(self, root):
        self.path = os.path.join(root, "heartbeat")

    def beat(self):
        with open(self.path, "w") as f:
            f.write(f"{time.time():.1f}\n")


class CheckpointManager:
    def __init__(self, root, keep=2):
        self.root = root
        self.keep = keep
        self.heartbeat = Heartbeat(root)
        self._ctx = multiprocessing.get_context("fork")
        self._packer = None

    def _path(self, step):
        return os.path.join(self.root, f"ckpt-{step:07d}.ptz")

    def steps(self):
        found = (_NAME.match(n) for n in os.listdir(self.root))
        return sorted(int(m.group(1)) for m in found if m)

    def save(self, step, state):
        if dist.get_rank() != 0:
            return
        self.flush()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self._packer = self._ctx.Process(
            target=_pack, args=(buffer.getvalue(), self._path(step)), name=f"pack-{step}", daemon=True
        )
        self._packer.start()

    def flush(self):
        """Wait for the pack in flight, if any, then drop what is over the limit."""
        job, self._packer = self._packer, None
        if job is None:
            return
        while job.is_alive():
            self.heartbeat.beat()
            time.sleep(0.01)
        if job.exitcode:
            raise RuntimeError(f"{job.name} ended with {job.exitcode}")
        for step in self.steps()[: -self.keep]:
            os.unlink(self._path(step))

    def load_latest(self):
        dist.barrier()
        step = self.steps()[-1]
        with open(self._path(step), "rb") as f:
            raw = zlib.decompress(f.read())
        return torch.load(io.BytesIO(raw), weights_only=True)
