"""The files that a job left: read within bounds, and one that is broken never loses the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_harness.cli.main import run_command_line
from nsa_harness.core.evidence.job_files import JobFileKind
from nsa_harness.supervisor.storage import job_files as module
from nsa_harness.supervisor.storage.job_files import read_job_files

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/ada/train.py", line 22, in step\nValueError: bad batch\n'


def lines_of(paths: list[Path]) -> list[str]:
    found = read_job_files(paths)
    return [f"{Path(one.what).name}: {one.why}" for one in found.trouble]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    (folder / "attempt_0" / "1").mkdir(parents=True)
    (folder / "attempt_0" / "1" / "stderr.log").write_text(TRACEBACK)
    return folder


def test_everything_below_a_folder_is_read_and_a_file_by_its_name_alone(logs: Path) -> None:
    (logs / "train.py").write_text(f"'''{TRACEBACK}'''")
    assert [Path(one.name).name for one in read_job_files([logs]).files] == ["stderr.log"]
    named = read_job_files([logs / "train.py", logs / "gone.log"])
    assert [one.kind for one in named.files] == [JobFileKind.LOG]
    assert [(Path(one.what).name, one.why) for one in named.trouble] == [("gone.log", "no such file or directory")]


def test_what_cannot_be_read_is_one_line_and_the_others_are_read(logs: Path) -> None:
    os.mkfifo(logs / "pipe.log")
    (logs / "link.log").symlink_to("/etc/hostname")
    (logs / "nowhere.log").symlink_to("gone")
    (logs / "packed.log.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (logs / "trace_0").write_bytes(b"\x80\x02}")
    found = read_job_files([logs, logs / "nowhere.log"])
    assert [(Path(one.what).name, one.why) for one in found.trouble] == [
        ("link.log", "a link, which is not followed"),
        ("nowhere.log", "a link, which is not followed"),
        ("pipe.log", "not a regular file"),
        ("nowhere.log", "a link that leads nowhere"),
    ]
    kinds = {Path(one.name).name: one.kind for one in found.files}
    assert kinds == {
        "stderr.log": JobFileKind.LOG,
        "packed.log.gz": JobFileKind.NOTHING,
        "trace_0": JobFileKind.NOTHING,
    }


def test_the_files_of_the_kernel_are_not_read() -> None:
    assert lines_of([Path("/proc")]) == ["proc: contains files of the kernel, not of a job: not read"]
    assert lines_of([Path("/proc/self")])[0].endswith("contains files of the kernel, not of a job: not read")


def test_of_a_huge_log_its_beginning_and_its_end_are_read(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEAD_BYTES", 1 << 15)
    monkeypatch.setattr(module, "_TAIL_BYTES", 1 << 15)
    log = logs / "huge.log"
    with log.open("wb") as file:
        file.write(b"RANK=3\n")
        file.truncate(1 << 40)  # a hole: it takes no room
        file.seek(0, 2)
        file.write(f"\n{TRACEBACK}".encode())
    found = read_job_files([log])
    (one,) = found.trouble
    assert one.why.endswith("bytes in the middle were not read")
    assert [one.kind for one in found.files] == [JobFileKind.NOTHING]  # zeros are no text
    log.write_bytes(b"RANK=3\n" + b"loss 0.1\n" * 20_000 + TRACEBACK.encode())
    found = read_job_files([log])
    assert found.files[0].text.startswith("RANK=3\n")
    assert found.files[0].text.endswith(TRACEBACK)
    assert len(found.trouble) == 1


def test_of_very_many_files_those_are_read_that_look_like_what_a_job_leaves(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_FILES", 2)
    for number in range(5):
        (logs / f"batch{number}.bin").write_text("x\n")
    found = read_job_files([logs])
    assert "stderr.log" in {Path(one.name).name for one in found.files}
    assert lines_of([logs]) == ["logs: 6 files: 4 of them were not read; name the files that matter"]


def test_a_run_of_ours_is_said_to_be_judged_by_report(tmp_path: Path) -> None:
    run = tmp_path / "20261123T020000-ab12"
    (run / "job").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"schema": 1, "plan": []}))
    (run / "job" / "stderr.log").write_text(TRACEBACK)
    (line,) = lines_of([tmp_path])
    assert "a run of nsa-harness, which was not read; to judge it, run `nsa-harness report" in line
    assert read_job_files([run]).files == []


def test_folders_without_end_are_left_at_some_depth(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath(*["d"] * 20)
    deepest.mkdir(parents=True)
    (deepest / "rank0.log").write_text(TRACEBACK)
    assert [line.partition(": ")[2] for line in lines_of([tmp_path])] == ["more than 12 directories deep: not read"]


# The command.


def test_the_command_tells_the_answer_last_and_ends_as_run_does(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["read", str(logs)]) == 1
    told = capsys.readouterr()
    assert "FAIL  logs   exception · likely cause · judged from its files" in told.out
    assert "Rank 1 raised ValueError: bad batch (ada/train.py:22)." in told.out
    assert told.err == ""
    assert list(logs.parent.iterdir()) == [logs]


def test_a_report_is_written_where_it_is_asked_for(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = logs.parent / "out"
    assert run_command_line(["read", str(logs), "--json", "--out", str(out)]) == 1
    stored = json.loads((out / "latest" / "report.json").read_text())
    printed = json.loads(capsys.readouterr().out)
    assert printed["outcomes"] == stored["outcomes"]
    (finding, *_) = stored["outcomes"][0]["findings"]
    assert finding["proof"] == [str(logs / "attempt_0" / "1" / "stderr.log")]
    assert {"SUMMARY.md", "report.html", "junit.xml"} <= {path.name for path in (out / "latest").iterdir()}


def test_nothing_usable_is_exit_2_with_a_reason_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "\x1b[31mred").write_bytes(b"\x1f\x8b\x08\x00")
    assert run_command_line(["read", str(tmp_path), str(tmp_path / "gone")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "\x1b" not in told.err
    assert [line.rpartition("/")[2] for line in told.err.splitlines()[1:]] == [
        "gone: no such file or directory",
        "red: it is packed; unpack it first",
    ]


def test_secrets_and_control_characters_of_a_log_do_not_pass(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"{TRACEBACK.rstrip()} \x1b]0;title\x07 HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789\n"
    (logs / "attempt_0" / "1" / "stderr.log").write_text(said)
    assert run_command_line(["read", str(logs), "-v"]) == 1
    told = capsys.readouterr().out
    assert "bad batch" in told
    assert "hf_abcdefghijklmnop" not in told
    assert "\x1b" not in told
    assert "\x07" not in told


def test_a_log_leads_to_no_file_but_a_source(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hidden = logs.parent / "hidden.txt"
    hidden.write_text("first\nthe password\n")
    os.utime(hidden, (1, 1))
    said = TRACEBACK.replace("/home/ada/train.py", str(hidden)).replace("line 22", "line 2")
    (logs / "attempt_0" / "1" / "stderr.log").write_text(said)
    assert run_command_line(["read", str(logs), "-v"]) == 1
    assert "the password" not in capsys.readouterr().out


def test_help_shows_what_may_be_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nsa_harness", "read", "--help"], capture_output=True, text=True, check=True
    )
    assert "nsa-harness read slurm-4711.out /tmp/nccl_trace_rank_*" in done.stdout
