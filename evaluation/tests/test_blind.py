"""No answer hangs on a word of the program: its names, its comments, its own messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from builders import board, call, frame, raised, rank_evidence, rank_snapshot, stalled

from evaluation.blind import PROJECT, Blindfold, answer, collected, compared, recordings
from nsa_harness.core.evidence.evidence import Evidence, Frame, Stack
from nsa_harness.core.source_code.collection import excerpts

ROUNDS = Path(__file__).parents[1] / "rounds"
# Of each kind of answer one.
RECORDED = {
    "round1": (
        "llm_pretraining/p6/a/main.py",
        "model_parallel/p1/a/train_pipe.py",
        "model_parallel/p7/a/run_pretrain.py",
        "vision_trainers/p3/a/train_net.py",
    ),
    "round2": (
        "data_engineering/p2/b/train_mixture.py",
        "data_engineering/p6/b/train_seqs.py",
        "finetune_accelerate/p3/b/run_clm_no_trainer.py",
        "speech_lengths/p1/b/train_ctc.py",
        "speech_lengths/p2/a/asr_train.py",
    ),
    "round3": ("search_and_resume/p2/a/train_tower.py",),
}
FILE = f"{PROJECT}pipeline/train.py"
PROGRAM = dedent(
    '''\
    """Trains."""

    import torch.distributed as dist
    from pipeline.boards import ScoreBoard

    class Trainer:
        """Of
        scores."""

        def __init__(self, board: ScoreBoard):
            self.board, self.score = board, 0.0

        def publish(self, epoch):
            # Rank 0 alone knows it.
            if dist.get_rank() == 0:
                self.board.set(f"epoch{epoch}/\\tscore: {self.score:>8.2f} {{}}", "done")

        def read(self, epoch):
            return self.board.get(f"epoch{epoch}")

        def verify(self):
            raise ValueError("batch skipped: no score")

        def forward(self, batch):
            return dist.all_reduce(batch)
    '''
)


def at(text: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.splitlines(), start=1) if text in line)


def there(text: str, function: str) -> Frame:
    return frame(at(text), file=FILE, function=function)


def waits_for_a_key() -> Evidence:
    leaf = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    boards = (
        board(rank=0, calls=(call(1, left_s=None),)),
        board(rank=1, calls=(call(1, "wait store.get", left_s=None, key="epoch3"),)),
    )
    stands = (there("all_reduce", "Trainer.forward"), there("board.get", "Trainer.read"))
    looks = [rank_snapshot(rank, leaf, stands[rank], status_file=boards[rank]) for rank in (0, 1)]
    ranks = tuple(rank_evidence(rank, status_file=one) for rank, one in enumerate(boards))
    program = PROGRAM.replace('/\\tscore: {self.score:>8.2f} {{}}"', '"')
    return replace(
        stalled(*looks, ranks=ranks), sources=tuple(excerpts(FILE, program, {at("board.set"), at("board.get")}))
    )


@pytest.mark.parametrize(("home", "programs"), RECORDED.items())
def test_a_recording_is_answered_alike_without_the_words_of_its_program(home: str, programs: tuple[str, ...]) -> None:
    seen = list(recordings(ROUNDS / home, programs))
    assert {program for program, _, _ in seen} == set(programs)
    changed = {program: compared(evidence, texts, field_stays=True) for program, evidence, texts in seen}
    assert not any(changed.values()), changed
    assert all(answer(collected(evidence, texts))["line"] for _, evidence, texts in seen)


@pytest.mark.parametrize("field_stays", [True, False])
def test_who_sets_a_key_is_found_whatever_the_key_is_called(field_stays: bool) -> None:
    seen = waits_for_a_key()
    assert answer(seen)["line"] == at("board.set")
    assert compared(seen, {FILE: PROGRAM}, field_stays=field_stays) == []


def test_a_blind_source_has_its_statements_on_their_lines_and_no_word_of_its_own() -> None:
    blindfold = Blindfold({FILE: PROGRAM, f"{PROJECT}pipeline/boards.py": "class ScoreBoard: ..."}, field_stays=False)
    (path, text), *_ = blindfold.texts().items()
    assert blindfold.unblind(path) == FILE
    assert path == f"{PROJECT}qaaaa/qaaab.py"
    assert text == dedent(
        """\
        ""

        import torch.distributed as dist
        from qaaaa.qaaac import qaaad

        class qaaae:
            ""


            def __init__(self, qaaaf: qaaad):
                self.qaaaf, self.qaaag = qaaaf, 0.0

            def qaaah(self, qaaai):

                if dist.get_rank() == 0:
                    self.qaaaf.set(f"qaaai{qaaai}/\\tqaaag: {self.qaaag:>8.2f} {{}}", "qaaaj")

            def read(self, qaaai):
                return self.qaaaf.get(f"qaaai{qaaai}")

            def qaaak(self):
                raise ValueError("qaaal qaaam: qaaan qaaag")

            def forward(self, qaaal):
                return dist.all_reduce(qaaal)
        """
    )


def test_an_import_names_the_file_that_it_named_before_and_what_others_take_keeps_its_name() -> None:
    program = dedent(
        """\
        import tower.data
        from torch.utils.data import DataLoader
        from .data import utils, key
        from utils import sampler
        loader = DataLoader(tower.data.rows, sampler=sampler, batch_size=len(sorted(rows, key=key)))
        rows.data = sampler(key=key)
        """
    )
    files = {f"{PROJECT}train.py": program, f"{PROJECT}tower/data.py": "rows = key = ()", f"{PROJECT}utils.py": ""}
    blindfold = Blindfold(files, field_stays=True)
    tower, data, utils = (
        blindfold.path(f"{PROJECT}{one}.py")[len(PROJECT) : -3] for one in ("tower", "tower/data", "utils")
    )
    assert data.startswith(f"{tower}/")
    data = data.removeprefix(f"{tower}/")
    renamed = {name: blindfold.code(name) for name in ("loader", "key", "rows")}
    assert blindfold.texts()[blindfold.path(f"{PROJECT}train.py")].splitlines() == [
        f"import {tower}.{data}",
        "from torch.utils.data import DataLoader",
        f"from .{data} import {utils}, {renamed['key']}",
        f"from {utils} import sampler",
        f"{renamed['loader']} = DataLoader({tower}.{data}.{renamed['rows']}, sampler=sampler,"
        f" batch_size=len(sorted({renamed['rows']}, key={renamed['key']})))",
        f"{renamed['rows']}.data = sampler({renamed['key']}={renamed['key']})",
    ]


def test_what_the_program_says_is_gone_and_what_others_say_stays() -> None:
    own = raised(0, "ValueError", "batch skipped: no score", frames=(there("raise", "Trainer.verify"),))
    theirs = raised(0, message="Connection closed by peer", frames=(there("all_reduce", "Trainer.forward"),))
    blindfold = Blindfold({FILE: PROGRAM}, field_stays=True)
    lines = ("12:00 epoch 1: batch skipped", "ValueError: batch skipped: no score", "RuntimeError: Connection reset")
    seen = replace(
        waits_for_a_key(), ranks=tuple(rank_evidence(0, exception=one, error_lines=lines) for one in (own, theirs))
    )
    first, second = blindfold.evidence(seen).ranks
    assert (first.exception and first.exception.message, second.exception and second.exception.message) == (
        "x", "Connection closed by peer",
    )  # fmt: skip
    assert first.error_lines == ("x", "ValueError: x", "RuntimeError: Connection reset")
    assert [one.function for one in (*first.exception.frames, *second.exception.frames)] == [
        "qaaac.qaaad",
        "qaaac.forward",
    ]


def test_threads_of_libraries_keep_their_names() -> None:
    blindfold = Blindfold({FILE: PROGRAM}, field_stays=True)
    names = ("MainThread", "Thread-1 (publish)", "score-1", "pt_data_worker")
    stacks = tuple(Stack(thread=name, tid=None, active=False, frames=(), source="py-spy") for name in names)
    look = rank_snapshot(0, frame(1), status_file=None)
    seen = stalled(replace(look, stacks=stacks), ranks=())
    (after,) = blindfold.evidence(seen).snapshots[0].ranks
    assert [one.thread for one in after.stacks] == ["MainThread", "Thread-1 (qaaab)", "qaaac-1", "pt_data_worker"]
