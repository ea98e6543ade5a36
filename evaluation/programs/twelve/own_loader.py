"""Records come over a socket from a small store on this machine, read by the workers of a DataLoader."""

import argparse
import os
import pickle
import socket
import struct
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def serve(listener, size, lost):
    """Answers with a record for each number; a lost one is looked for for ever."""

    def answer(connection):
        while number := connection.recv(4):
            index = struct.unpack("!i", number)[0]
            if index == lost:
                threading.Event().wait()
            record = pickle.dumps([float((index * k) % 7) for k in range(1, size + 1)])
            connection.sendall(struct.pack("!i", len(record)) + record)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


class RemoteRecords(Dataset):
    def __init__(self, port, count, broken=None):
        self.port = port
        self.count = count
        self.broken = broken
        self.connection = None

    def __len__(self):
        return self.count

    def receive(self, size):
        data = b""
        while len(data) < size:
            data += self.connection.recv(size - len(data))
        return data

    def __getitem__(self, index):
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port))
        self.connection.sendall(struct.pack("!i", index))
        (size,) = struct.unpack("!i", self.receive(4))
        record = pickle.loads(self.receive(size))
        if index == self.broken:
            record = record[:-1]
        features, label = record[:8], record[8]
        return torch.tensor(features), torch.tensor([label])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=15)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bad_record = args.at * 4 * world_size + 1  # the second rank's
    listener = socket.create_server(("127.0.0.1", 0))
    lost = bad_record if args.fault == "hang" else None
    threading.Thread(target=serve, args=(listener, 9, lost), daemon=True).start()

    broken = bad_record if args.fault == "fail" else None
    records = RemoteRecords(listener.getsockname()[1], args.steps * 4 * world_size, broken)
    sampler = DistributedSampler(records, shuffle=False)
    loader = DataLoader(records, batch_size=4, sampler=sampler, num_workers=2)

    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(loader):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} pid {os.getpid()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
