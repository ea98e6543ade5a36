"""The recordings of ranks on disk: without secrets, and never an error, whatever their bytes are."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder_runs import record

from nsa_harness import protocol
from nsa_harness.core.recording.reading import DAMAGED, FULL, NotARecordingError, read_recording, records
from nsa_harness.core.recording.recording import RankRecording, Value
from nsa_harness.probe.record_file import RecordFile
from nsa_harness.supervisor.storage.recordings import RECORDING_FILE, load_recordings, redacted, store_recordings
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import AttemptDir

SECRET = "hf_" + "Zk3vQ8pLw2Xy7NtR5mBc9DsF1GhJ4Ke6Ua"


def write(
    path: Path, values: list[tuple[str, str]], limit: int = protocol.RECORDING_LIMIT, worker: int | None = None
) -> None:
    """Write a recording with one execution, which reads these names and texts. `worker`: as in RECORDING_CHILD."""
    file = RecordFile(str(path), 0, 2, limit)
    if worker is not None:
        file.write_worker(worker)
    string = file.string
    string("")
    file.write(protocol.RECORD_THREAD, [1, string("MainThread")])
    file.write(protocol.RECORD_CODE, [1, string("/ada/train.py"), string("main"), 1])
    file.write(protocol.RECORD_ENTER, [1, 1, 1, 0])
    reads = [number for name, text in values for number in (string(name), string("str"), string(text), 0)]
    file.write(protocol.RECORD_EXECUTE, [1, 1, 2, 1, *reads])
    file.write(
        protocol.RECORD_COMMUNICATION, [2, 1, string("all_reduce"), *[protocol.RECORD_ABSENT] * 3, 0, 2, 0, 1, 4]
    )
    file.write(protocol.RECORD_RAISED, [1, string("ValueError"), string("wrong")])
    file.write(protocol.RECORD_LEAVE, [1, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recording") / "1.record"
    write(path, [("x", "1"), ("self.bad", "2")])
    data = path.read_bytes()
    last_at, _, last_body = list(records(data))[-1]
    return data[: last_at + 2 * protocol.RECORD_HEAD.size + len(last_body)]


def test_what_was_written_is_read(whole: bytes) -> None:
    recording = read_recording(whole, 0)
    assert (recording.world_size, recording.problems) == (2, ())
    (execution,) = recording.threads[0].activations[0].executions
    assert execution.reads == (("x", Value("str", "1")), ("self.bad", Value("str", "2")))
    (communication,) = execution.communications
    assert (communication.ranks, communication.shape, communication.root) == ((0, 1), (4,), None)
    assert execution.raised is not None


@given(st.integers(0, 2000))
def test_a_recording_that_is_cut_off_gives_its_beginning(whole: bytes, size: int) -> None:
    try:
        recording = read_recording(whole[:size], 0)
    except NotARecordingError:
        assert size < protocol.RECORDING_HEADER_SIZE
    else:
        assert isinstance(recording, RankRecording)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_bytes_never_raise_another_error(whole: bytes, changes: list[tuple[int, int]]) -> None:
    data = bytearray(whole)
    for at, byte in changes:
        data[at % len(data)] = byte
    try:
        read_recording(bytes(data), 0)
        clean = redacted(bytes(data), Redaction())
        assert redacted(clean, Redaction()) == clean
        read_recording(clean, 0)
    except NotARecordingError:
        return


@given(st.binary(max_size=400))
def test_arbitrary_records_never_raise_another_error(body: bytes) -> None:
    header = protocol.RECORDING_HEADER.pack(protocol.RECORDING_MAGIC, protocol.RECORDING_LAYOUT, 1, 3, 11, 0, 1, 0)
    data = header.ljust(protocol.RECORDING_HEADER_SIZE, b"\0") + body
    read_recording(data, 0)
    redacted(data, Redaction())


def test_the_recordings_of_children_are_stored_with_their_rank_and_worker(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path)
    files = tmp_path / attempt.probe_files
    files.mkdir(parents=True)
    rank = os.getppid()  # the parent of this process, which writes the recordings of its children
    write(files / f"{rank}.record", [("x", "1")])
    for pid, worker in ((11, 1), (12, 2), (13, 1), (14, -1)):
        write(files / f"{pid}.record", [("token", SECRET)], worker=worker)
    (files / "15.record").write_bytes(b"no recording")
    assert store_recordings(attempt, {0: rank, 1: 1}) == ()
    assert not list(files.iterdir())
    ((recording,), notes) = load_recordings(attempt, 1)
    assert notes == ()
    names = [thread.name for thread in recording.children]
    assert sorted(names) == ["DataLoader worker 0", "DataLoader worker 0 (2)", "DataLoader worker 1", "child process"]
    assert all(thread.activations[0].function == "main" for thread in recording.children)
    stored = [gzip.decompress(file.read_bytes()) for file in attempt.rank(0).glob("recording-*.gz")]
    assert len(stored) == 4
    assert not any(SECRET.encode() in data for data in stored)


def test_a_record_that_cannot_be_read_is_noted(whole: bytes) -> None:
    damaged = whole[:-8] + protocol.RECORD_HEAD.pack(8, protocol.RECORD_CODE) + bytes(8)
    assert read_recording(damaged, 0).problems == (DAMAGED,)
    assert read_recording(redacted(damaged, Redaction()), 0).problems == (DAMAGED,)


def test_a_full_file_says_so(tmp_path: Path) -> None:
    write(tmp_path / "1.record", [(f"x{number}", f"{number:100}") for number in range(40)], limit=4096)
    assert FULL in read_recording((tmp_path / "1.record").read_bytes(), 0).problems


def test_a_secret_is_not_stored(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path)
    attempt.directory.make_directory(attempt.probe_files)
    write(
        attempt.probe_files / "7.record",
        [
            ("hub", f"'{SECRET}'"),
            ("password", "'ab'"),
            ("title", "'ab'"),
            ("config['api_key']", "'x7Kq2'"),
            ("x", "17"),
        ],
    )
    write(attempt.probe_files / "8.record", [("other", f"'{SECRET}'")])
    assert store_recordings(attempt, {0: 7, 1: None}) == ()
    assert not list(attempt.probe_files.iterdir())
    stored = gzip.decompress((attempt.rank(0) / RECORDING_FILE).read_bytes())
    assert SECRET.encode() not in stored
    assert b"x7Kq2" not in stored
    (recording,), notes = load_recordings(attempt, 2)
    assert [note.rank for note in notes] == [1]
    reads = {name: value.text for name, value in recording.threads[0].activations[0].executions[0].reads}
    assert reads["title"] == "'ab'"
    assert reads["password"].startswith("'$SECRET")
    assert reads["x"] == "17"


SECRETS = """
import os, random
letters = random.Random(3)
def text(length, start=""):
    return start + "".join(letters.choices("AbC9dEfGh2JkLmN4pQrStU6vWxYz357", k=length))
class Settings:
    pass
def connect(password, token):
    return password == token
def get_token():
    return text(24)
def main():
    api_key, secret_key = text(20), text(40)
    hub_token, github, openai = text(34, "hf_"), text(36, "ghp_"), text(48, "sk-")
    aws_secret_access_key, access = text(40), text(16, "AKIA")
    settings = Settings()
    settings.password, settings.client_secret = text(12), text(30)
    config = {"api_key": text(20), "db_password": text(10)}
    config["auth_token"] = text(26)
    header = {"Authorization": "Bearer " + text(40)}
    url = "postgres://ada:" + text(14) + "@db.example.com/runs"
    command = ["--api-key=" + text(20), "--password", text(16)]
    os.environ["WANDB_API_KEY"] = wandb_key = text(40)
    passphrase, private_key = text(9), text(64)
    connect(password=text(11), token=text(22))
    used = get_token()
    try:
        raise ValueError("bad password=" + text(13))
    except ValueError:
        pass
    with open("secrets.txt", "w") as file:
        file.write("\\n".join(DRAWN))
DRAWN = []
def kept(length, start="", draw=text):
    DRAWN.append(draw(length, start).upper() if start == "AKIA" else draw(length, start))
    return DRAWN[-1]
text = kept
main()
"""


def test_twenty_secrets_in_variables_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    probe = tmp_path / "boards"
    probe.mkdir()
    record(sys.executable, SECRETS, probe)
    drawn = (tmp_path / "secrets.txt").read_text().split()
    assert len(drawn) >= 20
    (source,) = probe.glob("*.record")
    assert any(secret.encode() in source.read_bytes() for secret in drawn)
    attempt = AttemptDir(tmp_path)
    assert store_recordings(attempt, {0: int(source.stem)}) == ()
    stored = gzip.decompress((attempt.rank(0) / RECORDING_FILE).read_bytes())
    assert [secret for secret in drawn if secret.encode() in stored] == []


@pytest.mark.parametrize(
    "data",
    [b"", b"no recording", gzip.compress(b"no recording"), gzip.compress(b"x" * 99)[:-5]],
    ids=["empty", "no archive", "another archive", "cut off"],
)
def test_a_stored_file_that_is_no_recording_is_noted(tmp_path: Path, data: bytes) -> None:
    attempt = AttemptDir(tmp_path)
    attempt.directory.make_directory(attempt.rank(0))
    (attempt.rank(0) / RECORDING_FILE).write_bytes(data)
    recordings, notes = load_recordings(attempt, 1)
    assert not recordings
    assert [note.what for note in notes] == ["recording"]
