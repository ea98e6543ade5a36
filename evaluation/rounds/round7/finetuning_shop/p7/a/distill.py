import argparse

import torch
import torch.distributed as dist

from roles import run_student, run_teacher


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--temperature", type=float, default=2.0)
    ap.add_argument("--lr", type=float, default=5e-3)
    cfg = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    students = dist.new_group(list(range(1, world)))
    if rank == 0:
        run_teacher(cfg, world - 1)
    else:
        net = run_student(cfg, rank, world - 1, students)
        if rank == 1:
            torch.save(net.state_dict(), "student.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
