"""The files of a run: where they are, how they are written, and what is read back of damaged ones."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_harness.core.scenario.scenario import RESERVED_NAMES
from nsa_harness.errors import StoredRunError, UsageError
from nsa_harness.supervisor.storage.rundir import RunDir, append_line, create_run, find_run, write_document
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = create_run(tmp_path / "reports")
    attempt = made.attempt("ddp")
    attempt.path.mkdir()
    attempt.spec.write_text("{}")
    return made


def test_a_new_run_has_a_directory_of_its_own_and_is_the_latest(tmp_path: Path) -> None:
    first, second = create_run(tmp_path), create_run(tmp_path)
    assert first.run_id != second.run_id
    assert (tmp_path / "latest").resolve() == second.path.resolve()
    assert os.readlink(tmp_path / "latest") == second.run_id, "relative, so that the reports may be moved"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([first.run_id, second.run_id, "latest"])


def test_a_directory_named_latest_is_kept_under_another_name(tmp_path: Path) -> None:
    """Each copy that follows links turns `latest` into a directory."""
    (tmp_path / "latest" / "ddp").mkdir(parents=True)
    made = create_run(tmp_path)
    assert os.readlink(tmp_path / "latest") == made.run_id
    assert (tmp_path / f"latest.before-{made.run_id}" / "ddp").is_dir()
    assert len(list(tmp_path.iterdir())) == 3, "no temporary link is left"


def test_a_name_of_a_scenario_cannot_be_that_of_a_file_of_the_run(tmp_path: Path) -> None:
    """A file that is missing in the list would make the first launch of such a scenario fail."""
    paths = (value for name, value in vars(RunDir(tmp_path)).items() if isinstance(value, Path) and name != "path")
    shared = {".lock", "repro"}  # `repro` may be the directory of an attempt and of a reproduction at once
    assert {path.name for path in paths} - shared == RESERVED_NAMES


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("named", ["", "ddp/spec.json"])
def test_a_run_of_another_user_is_refused_with_the_command_that_opens_it(run: RunDir, named: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run = RunDir(run.path.rename(Path(folder, run.run_id)))
        message = _as_nobody(run.path / named)
    assert message.startswith(f"StoredRunError {run.path.resolve()}: belongs to the user with id 0")
    assert message.endswith(f"sudo chown -R 65534 {run.path.resolve()}")


def _as_nobody(path: Path) -> str:
    """Return the error of `find_run` for another user."""
    source, target = os.pipe()
    if (child := os.fork()) == 0:
        os.setuid(65534)
        try:
            find_run(path, Path("elsewhere"))
        except BaseException as error:
            os.write(target, f"{type(error).__name__} {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(target)
    with open(source) as pipe:
        return pipe.read()


def test_later_attempts_have_folders_of_their_own(run: RunDir) -> None:
    assert [run.attempt("ddp", number).path.name for number in (1, 2, 3)] == ["ddp", "ddp~2", "ddp~3"]
    assert run.attempt("ddp").rank(3) == run.path / "ddp" / "rank3"


def test_attempts_come_in_the_order_in_which_they_were_launched(run: RunDir) -> None:
    for at_ns, name in ((300, "a"), (200, "z")):
        spec = run.path / name / "spec.json"
        spec.parent.mkdir()
        spec.write_text("{}")
        os.utime(spec, ns=(at_ns, at_ns))
    assert [attempt.path.name for attempt in run.attempts()] == ["z", "a", "ddp"]


@pytest.mark.parametrize("named", ["", "ddp", "ddp/spec.json"])
def test_a_run_is_found_by_itself_by_an_attempt_and_by_a_file_of_one(run: RunDir, named: str) -> None:
    assert find_run(run.path / named, Path("elsewhere")).path == run.path.resolve()


def test_a_run_is_found_by_its_id_and_the_newest_one_without_a_name(run: RunDir) -> None:
    assert find_run(Path(run.run_id), run.path.parent).path == run.path.resolve()
    assert find_run(None, run.path.parent).path == run.path.resolve()


SPECS = '{"schema": 1, "scenario": "ddp", "ranks": 2, "program": ["train.py"]}'


@pytest.mark.parametrize(
    ("holds", "of_ours"),
    [
        ({"api/spec.json": '{"openapi": "3.0"}'}, False),
        ({"run.json": '{"name": "run"}'}, False),
        ({"api/spec.json": "[" * 100_000, "run.json": "no JSON"}, False),
        ({"ddp/spec.json": SPECS}, True),
        ({"run.json": '{"schema": 1, "plan": []}'}, True),
    ],
)
def test_a_folder_of_strangers_is_no_run_though_its_files_have_such_names(
    tmp_path: Path, holds: dict[str, str], of_ours: bool
) -> None:
    # So deep that folders of other tests, which hold specs, are not looked at.
    home = tmp_path / "of" / "strangers" / "project"
    for name, text in {**holds, "sub/notes/x": ""}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    for named in (home, home / "sub", home / "sub" / "notes"):
        if of_ours:
            assert find_run(named, tmp_path).path == home.resolve()
        else:
            with pytest.raises(StoredRunError):
                find_run(named, tmp_path)


def test_a_run_by_its_name_is_one_however_damaged_it_is(tmp_path: Path) -> None:
    home = tmp_path / "20260101T000000-dead"
    (home / "ddp").mkdir(parents=True)
    (home / "ddp" / "spec.json").write_text("torn")
    assert find_run(home, tmp_path).path == home.resolve()


def test_a_run_that_is_not_there_is_an_error_that_names_the_newest_ones(run: RunDir) -> None:
    parent = run.path.parent
    with pytest.raises(StoredRunError) as error:
        find_run(Path("20200101T000000-dead"), parent)
    assert str(error.value) == (
        "20200101T000000-dead: not a stored run (no run.json and no */spec.json below it);"
        f" the latest runs in {parent} are {run.run_id}"
    )


def test_without_any_run_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoredRunError) as error:
        find_run(None, tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'latest'}: not a stored run (no run.json and no */spec.json below it); {tmp_path} contains no run"
    )


def test_a_document_is_replaced_whole_and_leaves_nothing_aside(tmp_path: Path) -> None:
    target = tmp_path / "SUMMARY.md"
    write_document(target, "old")
    write_document(target, "new \ud800")
    assert target.read_bytes() == b"new \\ud800"
    assert [entry.name for entry in tmp_path.iterdir()] == ["SUMMARY.md"]


def test_a_document_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(IsADirectoryError):
        write_document(target, "new")
    assert (target / "old").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_journal_gives_back_what_was_appended(tmp_path: Path) -> None:
    journal = tmp_path / "watch.jsonl"
    records = [{"event": "a", "text": "zwei\nZeilen"}, {"event": "b", "n": None}]
    for record in records:
        append_line(journal, record)
    assert list(SafeDirectory(tmp_path).read_records(journal)) == records


def test_a_torn_or_foreign_line_of_a_journal_is_passed_over(tmp_path: Path) -> None:
    journal = tmp_path / "watch.jsonl"
    journal.write_bytes(b'{"n":1}\n{"n":\nnull\n[2]\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"n":3}\n{"n":4')
    assert list(SafeDirectory(tmp_path).read_records(journal)) == [{"n": 1}, {"n": 3}]
    assert list(SafeDirectory(tmp_path).read_records(tmp_path / "missing.jsonl")) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200), st.integers(0, 60))
def test_reading_a_journal_never_raises(tmp_path: Path, noise: bytes, cut: int) -> None:
    journal = tmp_path / "watch.jsonl"
    whole = json.dumps({"event": "exit", "t_ns": 17}).encode() + b"\n"
    journal.write_bytes(whole + whole[:cut] + noise)
    assert all(isinstance(record, dict) for record in SafeDirectory(tmp_path).read_records(journal))
    assert {"event": "exit", "t_ns": 17} in list(SafeDirectory(tmp_path).read_records(journal))


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(b"x" * (1 << 20) + b"\xffend")
    assert SafeDirectory(tmp_path).read_tail(log).endswith("\ufffdend")
    assert len(SafeDirectory(tmp_path).read_tail(log)) == 1 << 20
    assert SafeDirectory(tmp_path).read_tail(tmp_path / "missing.log") == ""


def test_a_run_that_can_be_stored_nowhere_is_refused_with_what_to_name_instead(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match=r"below .*file: not a directory; choose a directory with --out DIR"):
        create_run(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
