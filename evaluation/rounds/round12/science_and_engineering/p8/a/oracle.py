"""Labels come from a slow cell solver that only rank 0 has a licence for."""
import io
import socket
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def open_label_store(rank, world):
    port = torch.tensor([free_port() if rank == 0 else 0])
    dist.broadcast(port, src=0)
    return dist.TCPStore("127.0.0.1", int(port), world, is_master=rank == 0,
                         timeout=timedelta(hours=2), wait_for_workers=False)


def cell_voltage(x):
    soc, rate, temp = x.T
    return 3.2 + 0.9 * soc - 0.25 * rate * (1.3 - temp) + 0.1 * np.tanh(8 * (soc - 0.1))


class LabelExchange:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.store = open_label_store(rank, world)
        self.solved = 0

    @staticmethod
    def _pack(*arrays):
        buf = io.BytesIO()
        np.savez(buf, *arrays)
        return buf.getvalue()

    @staticmethod
    def _unpack(blob):
        with np.load(io.BytesIO(blob)) as z:
            return [z[k] for k in z.files]

    def exchange(self, round_no, candidates):
        """Hand my candidates to the solver; get back everything that it labelled in this round."""
        self.store.set(f"ask/{round_no}/{self.rank}", self._pack(candidates))
        if self.rank == 0:
            asked = [self._unpack(self.store.get(f"ask/{round_no}/{r}"))[0] for r in range(self.world)]
            batch = np.unique(np.concatenate(asked).round(6), axis=0)
            labels = cell_voltage(batch)
            self.solved += len(batch)
            self.store.set(f"labels/{round_no}", self._pack(batch, labels))
        points, values = self._unpack(self.store.get(f"labels/{round_no}"))
        return torch.from_numpy(points).float(), torch.from_numpy(values).float()
