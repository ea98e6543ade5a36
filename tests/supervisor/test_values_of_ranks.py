"""Values of the ranks: requested from the probe or read with py-spy, stored without secrets, and read back."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from living import program
from planted_secrets import planted, shown

from nsa_harness import protocol
from nsa_harness.core.evidence.frame_values import FrameValues, ProcessValues, ReadWhen, StackValues, frames_of
from nsa_harness.supervisor.capture.values import ValueReader
from nsa_harness.supervisor.storage.redacted_files import write_bundle
from nsa_harness.supervisor.storage.rundir import AttemptDir, create_run
from nsa_harness.supervisor.storage.values import FILE, collect_values, remove_values, write_values

HARNESS = str(Path(__file__).parents[2] / "harness")
# A rank that is blocked in C and releases the GIL: its heartbeat thread answers.
SLEEPS = f"""
import os, sys, threading, time
sys.path.insert(0, {HARNESS!r})
from nsa_harness import protocol
from nsa_harness.probe.frame_values import FrameValues
from nsa_harness.probe.patches import TroubleLog
from nsa_harness.probe.status_file import StatusFileWriter
directory, rank, answers = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "answers"
path = os.path.join(directory, protocol.STATUS_FILE.format(pid=os.getpid()))
status_file = StatusFileWriter(path, rank=rank, world_size=2)
values = FrameValues(status_file, directory, TroubleLog(directory))
def beat():
    while True:
        values.answer() if answers else None
        time.sleep(0.25)
threading.Thread(target=beat, daemon=True).start()
class Stopper:
    pass
def main():
    stopper, patience = Stopper(), 3
    stopper.bad = rank
    print("ready", flush=True)
    time.sleep(600)
    return stopper.bad < patience
main()
"""


RUNS = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def ranks(stack: ExitStack, directory: Path, count: int, answers: str = "answers") -> dict[int, int]:
    """Rank -> pid of ranks that sleep."""
    file = directory / "train.py"
    file.write_text(SLEEPS)
    words = [(str(file), str(directory), str(rank), answers) for rank in range(count)]
    programs = [program(RUNS, *each, options=("-u",)) for each in words]
    return {rank: stack.enter_context(each).pid for rank, each in enumerate(programs)}


def texts(values: ProcessValues) -> dict[str, str]:
    return {name: text for frame in frames_of(values) if frame.function == "main" for name, text in frame.values}


def test_sleeping_ranks_give_their_values_and_keep_no_file(tmp_path: Path) -> None:
    with ExitStack() as stack:
        living = ranks(stack, tmp_path, 8)
        reader = ValueReader(probe_dir=tmp_path)
        begin_s = time.monotonic()
        found = {values.rank: values for values in reader.read(living)}
        took_s = time.monotonic() - begin_s
    assert reader.trouble == []
    assert {rank: texts(values) for rank, values in found.items()} == {
        rank: {"rank": str(rank), "patience": "3", "stopper.bad": str(rank)} for rank in range(8)
    }
    assert {values.when for values in found.values()} == {ReadWhen.REQUEST}
    assert took_s < 6.0
    assert list(tmp_path.glob("*.values.json*")) == []


def test_values_that_a_failing_rank_requested_are_not_requested_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        living = ranks(stack, tmp_path, 1)
        own = tmp_path / protocol.VALUES.format(pid=living[0])
        own.write_text(raw(0))
        (values,) = ValueReader(probe_dir=tmp_path).read(living, takes_written=True)
        assert (values.when, own.exists()) == (ReadWhen.EXCEPTION, False)
        (values,) = ValueReader(probe_dir=tmp_path).read(living, takes_written=True)
        assert values.when is ReadWhen.REQUEST


def test_py_spy_reads_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    with ExitStack() as stack:
        living = ranks(stack, tmp_path, 1, "never")
        (values,) = ValueReader(probe_dir=tmp_path).read(living)
    assert values.when is ReadWhen.PY_SPY
    assert texts(values) == {"patience": "3"}


def test_a_rank_without_a_probe_and_a_dead_one_are_no_trouble_for_the_others(tmp_path: Path) -> None:
    with ExitStack() as stack:
        living = ranks(stack, tmp_path, 1)
        ended = subprocess.Popen(["true"])
        ended.wait()
        reader = ValueReader(probe_dir=tmp_path)
        (values,) = reader.read({**living, 1: ended.pid})
    assert (values.rank, reader.trouble) == (0, [])


def test_a_rank_of_which_nothing_can_be_read_is_noted(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        reader = ValueReader(probe_dir=tmp_path)
        assert reader.read({3: sleeper.pid}) == []
    finally:
        sleeper.kill()
        sleeper.wait()
    assert [(trouble.what, trouble.rank) for trouble in reader.trouble] == [("values", 3)]


def test_a_damaged_answer_is_noted_and_removed(tmp_path: Path) -> None:
    own = tmp_path / protocol.VALUES.format(pid=77)
    own.write_text('{"threads": 3}')
    reader = ValueReader(probe_dir=tmp_path)
    assert reader.read({}, {0: 77}) == []
    assert [(trouble.what, trouble.rank) for trouble in reader.trouble] == [("values", 0)]
    assert not own.exists()


# Storing.


def of_rank(rank: int, *named: tuple[str, str]) -> ProcessValues:
    frame = FrameValues(file="/job/train.py", line=3, function="main", values=named)
    return ProcessValues(rank=rank, when=ReadWhen.REQUEST, stacks=(StackValues(thread="MainThread", frames=(frame,)),))


def twenty_secrets() -> list[tuple[str, str, str]]:
    """The name of a variable, the text of its value, and the secret in it."""
    by_format = [(f"text_{at}", said, value) for at, (said, value) in enumerate(planted()["log"].items())]
    by_name = [
        "password", "self.config.api_key", "args.hf_token", "db_password", "secret", "client_secret", "auth_token",
        "credentials", "passwd", "access_key", "opts.private_key", "wandb_api_key",
    ]  # fmt: skip
    return [
        *((name, repr(said), value) for name, said, value in by_format),
        *((name, repr(f"horse-{at}-Battery"), f"horse-{at}-Battery") for at, name in enumerate(by_name)),
    ]


def raw(rank: int) -> str:
    values = [[name, "str", text] for name, text, _ in twenty_secrets()]
    values.append(["settings", "dict", repr({"password": "horse-77-Battery"})])
    frame = {"file": "/job/train.py", "line": 3, "function": "main", "values": values}
    threads = [{"name": "MainThread", "frames": [frame]}]
    return json.dumps({"at_ns": rank, "reason": "exception", "is_cut": False, "threads": threads})


def secrets() -> list[str]:
    return [*(value for _, _, value in twenty_secrets()), "horse-77-Battery"]


def leaks(directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [f"{path.name}: {value}" for path in files for value in secrets() if value.encode() in path.read_bytes()]


def test_twenty_secrets_in_variables_are_in_no_file(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    attempt = run.attempt("train")
    attempt.probe_files.mkdir(parents=True)
    (attempt.probe_files / "100.values.json").write_text(raw(0))
    assert len(secrets()) == 21
    assert len(leaks(run.path)) == 21

    found, trouble = collect_values(attempt, {0: 100}, is_needed=True)

    assert (trouble, leaks(run.path), shown(run.path)) == ((), [], {})
    assert not any(value in repr(found) for value in secrets())
    names = {name: text for frame in frames_of(found[0]) for name, text in frame.values}
    assert names["password"].startswith("'$SECRET_")
    write_bundle(run, tmp_path / "bundle.tar.gz")
    with tarfile.open(tmp_path / "bundle.tar.gz") as bundle:
        packed = [file.read() for member in bundle if (file := bundle.extractfile(member))]
    assert not any(value.encode() in data for value in secrets() for data in packed)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = AttemptDir(tmp_path)
    made.probe_files.mkdir()
    return made


def test_values_are_stored_and_read_again(attempt: AttemptDir) -> None:
    values = of_rank(1, ("stopper.bad", "3"), ("mode", "'train'"))
    write_values(attempt, [values])
    for _ in range(2):
        assert collect_values(attempt, {0: None, 1: 100}, is_needed=True) == ((values,), ())
    remove_values(attempt, 2)
    assert collect_values(attempt, {0: None, 1: 100}, is_needed=True) == ((), ())


def test_values_read_at_the_hang_are_not_replaced_by_those_of_the_end(attempt: AttemptDir) -> None:
    values = of_rank(0, ("stopper.bad", "3"))
    write_values(attempt, [values])
    (attempt.probe_files / "100.values.json").write_text(raw(0))
    assert collect_values(attempt, {0: 100}, is_needed=True) == ((values,), ())
    assert not (attempt.probe_files / "100.values.json").exists()


def test_a_run_that_passed_stores_none(attempt: AttemptDir) -> None:
    (attempt.probe_files / "100.values.json").write_text(raw(0))
    assert collect_values(attempt, {0: 100}, is_needed=False) == ((), ())
    assert [path for path in attempt.path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("text", ["", "{}", '{"rank": 0, "when": "never", "stacks": []}', "[" * 5000, "x" * (2 << 20)])
def test_damaged_and_hostile_files_are_noted(attempt: AttemptDir, text: str) -> None:
    attempt.rank(0).mkdir()
    (attempt.rank(0) / FILE).write_text(text)
    found, (trouble,) = collect_values(attempt, {0: None}, is_needed=True)
    assert (found, trouble.what, trouble.rank) == ((), "values", 0)
    assert len(trouble.why) < 400


def test_a_link_is_not_followed(attempt: AttemptDir, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside.json"
    outside.write_text(json.dumps({"rank": 0, "when": "request", "stacks": []}))
    attempt.rank(0).mkdir()
    os.symlink(outside, attempt.rank(0) / FILE)
    found, trouble = collect_values(attempt, {0: None}, is_needed=True)
    assert found == ()
    assert [each.what for each in trouble] == ["values"]
