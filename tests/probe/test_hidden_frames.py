"""A guest is not seen in the tracebacks of the program it rides in: one real process, as a user starts it."""

from __future__ import annotations

from pathlib import Path

from ranks import Boards, run_forks

PROGRAM = """
import logging, sys, threading, traceback
import torch, torch.distributed as dist

dist.init_process_group("gloo")
logging.basicConfig()


class Refused(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        raise ValueError("refused in backward")


def step():
    Refused.apply(torch.ones(1, requires_grad=True)).sum().backward()


def gather():
    dist.all_gather([torch.ones(2)], torch.ones(3), group=7)


for number, act in enumerate((step, gather)):
    try:
        act()
    except Exception:
        print("printed")
        traceback.print_exc()
        logging.exception("logged")
        entry, counts = sys.exc_info()[2], set()
        while entry is not None:
            counts.add(len(traceback.extract_tb(entry, limit=1)))
            entry = entry.tb_next
        print("entries", counts)
        print("frames", [frame.filename for frame in traceback.extract_tb(__import__("sys").exc_info()[2])])
thread = threading.Thread(target=step)
thread.start()
thread.join()
try:
    step()
except ValueError as error:
    raise RuntimeError("uncaught") from error
"""


def test_a_user_sees_no_frame_of_the_probe_and_the_record_of_the_end_has_them(tmp_path: Path) -> None:
    (ended,) = run_forks(1, "-c", PROGRAM, boards=tmp_path)
    said = ended.out + ended.err
    assert said.count("ValueError: refused in backward") == 4  # printed, logged, of a thread, and of the end
    assert said.count("in step") == 4
    assert "RuntimeError: uncaught" in ended.err
    assert said.count("entries {1}") == 2  # pytest asks for each entry by itself, also for the probe's
    assert "torch/_tensor.py" in said  # torch's own frames stay
    assert "harness/nsa_harness/probe" not in said
    chain = Boards(tmp_path).json("{pid}.raised.json", ended.pid)["chain"]
    assert any("harness/nsa_harness/probe/patches.py" in frame["file"] for frame in chain[0]["frames"])
