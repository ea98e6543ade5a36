"""Texts to files of tokens: whole or not at all, on again after a kill, and what nsa.train reads of them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Alone
from ranks import wait_for

from nsa_attention import prepare as command
from nsa_attention.data import Batches
from nsa_attention.data.stories import story
from nsa_attention.prepare import Progress, main
from nsa_attention.settings import read_settings
from nsa_attention.world import World

Told = pytest.CaptureFixture[str]
TEXTS = [story(number) for number in range(600)]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, texts in (("a", TEXTS[:300]), ("b", TEXTS[300:])):
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def expected(texts: list[str]) -> bytes:
    return b"".join(text.encode() + b"\0" for text in texts)


def tokens(folder: Path) -> bytes:
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.bin")))
    return bytes(np.frombuffer(content, "<u2").astype(np.uint8))


@pytest.mark.parametrize("workers", ["0", "3"])
def test_every_text_stands_in_the_files_in_its_order(shards: Path, tmp_path: Path, capsys: Told, workers: str) -> None:
    assert main([str(shards), "--out", str(tmp_path / "out"), "--workers", workers]) == 0
    assert tokens(tmp_path / "out") == expected(TEXTS)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["dtype"], meta["vocab"], meta["end"], meta["tokenizer"]) == ("uint16", 256, 0, "bytes")
    assert [part["documents"] for part in meta["parts"]] == [300, 300]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "meta.json",
        "train_00000.bin",
        "train_00001.bin",
    ]
    assert not (tmp_path / "out.partial").exists()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"nsa.prepare: {shards}/a.jsonl: 300 documents, {len(expected(TEXTS[:300])):,} tokens"
    assert len(lines) == 3


def test_what_it_made_is_trained_on_with_its_documents(shards: Path, alone: Alone) -> None:
    assert main([str(shards), "--out", "tokens"]) == 0
    status, output, _ = alone("--data", "tokens", "--layers", "1", "--steps", "2")
    assert status == 0
    assert "token files, packing documents, 2 workers" in output


def test_the_windows_are_those_of_the_texts(shards: Path, tmp_path: Path) -> None:
    assert main([str(shards / "a.jsonl"), "--out", str(tmp_path / "out")]) == 0
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)
    settings = read_settings(("--data", str(tmp_path / "out"), "--seq-len", "100", "--batch", "1"), {})
    batches = Batches(settings, world)
    line = expected(TEXTS[:300])
    count = (len(line) - 1) // 100
    seen = sorted(bytes(batches.fetch().tokens[0].tolist()) for _ in range(count))
    batches.close()
    assert seen == sorted(line[100 * number : 100 * number + 100] for number in range(count))


def test_a_killed_command_goes_on_and_makes_what_it_would_have_made(shards: Path, tmp_path: Path, capsys: Told) -> None:
    """The second shard is a pipe that nobody feeds, so the kill comes when the first part is there."""
    (shards / "b.jsonl").unlink()
    os.mkfifo(shards / "b.jsonl")
    out = tmp_path / "out"
    program = [sys.executable, "-m", "nsa_attention.prepare", str(shards), "--out", str(out)]
    process = subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / "out.partial" / "train_00000.json").exists, "the first part")
        wait_for((tmp_path / "out.partial" / "train_00001.bin").exists, "the second one")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not out.exists()
    first = (tmp_path / "out.partial" / "train_00000.bin").stat()
    (shards / "b.jsonl").unlink()
    lines = [json.dumps({"text": text}) for text in TEXTS[300:]]
    (shards / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert main([str(shards), "--out", str(out)]) == 0
    assert "a.jsonl: finished earlier, " in capsys.readouterr().err
    assert (out / "train_00000.bin").stat().st_mtime_ns == first.st_mtime_ns
    assert tokens(out) == expected(TEXTS)


def test_a_part_of_another_shard_or_vocabulary_is_made_again(shards: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "train_00000.bin").write_bytes(b"old")
    old = {"file": "train_00000.bin", "source": "a.jsonl 5", "tokenizer": "bytes", "tokens": 9, "documents": 1}
    (partial / "train_00000.json").write_text(json.dumps(old))
    (partial / "train_00001.json").write_text("half writ")
    assert main([str(shards), "--out", str(tmp_path / "out")]) == 0
    assert tokens(tmp_path / "out") == expected(TEXTS)


def test_what_is_bad_is_left_out_and_told_or_stops(shards: Path, tmp_path: Path, capsys: Told) -> None:
    (shards / "c.jsonl").write_text("no json\n")
    (shards / "d.jsonl.gz").write_bytes(b"no gzip")
    assert main([str(shards), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"nsa.prepare: error: {shards}/c.jsonl, record 1: is not JSON (")
    assert not (tmp_path / "out").exists()
    assert main([str(shards), "--out", str(tmp_path / "out"), "--bad-shards", "skip"]) == 0
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("nsa.prepare: 1 records skipped, 2 shards skipped: ")
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["left_out"] == {"records": 1, "shards": 2}
    assert tokens(tmp_path / "out") == expected(TEXTS)


def test_all_mistakes_of_a_command_come_at_once(tmp_path: Path, capsys: Told) -> None:
    given = ["synthetic", str(tmp_path / "none"), "--out", "x", "--bad-shards", "keep", "--workers", "many"]
    assert main(given) == 2
    assert [line.partition("error: ")[2][:46] for line in capsys.readouterr().err.splitlines()] == [
        "input: expected texts; synthetic data consists",
        "input: expected synthetic, text, stories, hf:P",
        '--bad-shards: expected skip or stop, got "keep',
        "--workers: expected a whole number of at least",
    ]


def test_a_folder_that_is_there_or_cannot_be_made_is_one_error(shards: Path, tmp_path: Path, capsys: Told) -> None:
    assert main([str(shards), "--out", str(shards)]) == 2
    assert capsys.readouterr().err.endswith(": already exists; remove it, or choose another directory\n")
    (tmp_path / "file").touch()
    assert main([str(shards), "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written (" in capsys.readouterr().err


def test_texts_without_a_document_are_an_error(tmp_path: Path, capsys: Told) -> None:
    (tmp_path / "a.txt").touch()
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--bad-shards", "skip"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("nsa.prepare: error: no document in the shards; 1 shar")


def test_an_interrupt_says_that_the_same_command_goes_on(
    shards: Path, tmp_path: Path, capsys: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_finish", interrupted)
    assert main([str(shards), "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.endswith("nsa.prepare: interrupted; run the same command again to continue\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_of_what_was_read(shards: Path, tmp_path: Path) -> None:
    terminal = Terminal()
    request = command._read_request([str(shards), "--out", str(tmp_path / "out"), "--workers", "0"])
    progress = Progress(terminal)
    command.prepare(request, progress)
    bars = [piece for piece in terminal.getvalue().split("\r") if piece.startswith("[")]
    assert bars
    assert "shard 1 of 2" in bars[0]
    assert progress.line().startswith(f"[{'#' * 24}] 100%  shard 2 of 2  {len(expected(TEXTS)):,} tokens")


def test_help_names_every_option(capsys: Told) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("INPUT", "--out", "--tokenizer", "--text-field", "--bad-shards", "--workers"))
