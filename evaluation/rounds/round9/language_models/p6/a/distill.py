import sys

import torch
import torch.distributed as dist
import torch.nn as nn

from protocol import CONTEXT, VOCAB, TeacherServer
from student import train_student


def mlp(width):
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.Flatten(), nn.Linear(width * CONTEXT, width), nn.ReLU(), nn.Linear(width, VOCAB))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    max_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    teacher = world - 1
    students = dist.new_group(list(range(teacher)))
    torch.manual_seed(1 if rank == teacher else 2)
    if rank == teacher:
        served = TeacherServer(mlp(48), range(teacher)).run()
        print(f"teacher served {served} rows", flush=True)
    else:
        steps, score = train_student(mlp(12), students, teacher, max_steps, lr=3e-3)
        if rank == 0:
            print(f"student: {steps} steps, agreement {score:.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
