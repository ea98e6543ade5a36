"""Habits of other programs: each name leads to an option of ours, and the table in the documentation says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from nsa_attention.foreign_options import FOREIGN_OPTIONS, ForeignOption, replacement_for
from nsa_attention.options import SettingsError
from nsa_attention.settings import parser, read_settings

FLAGS = {word for action in parser()._actions for word in action.option_strings}


def test_every_option_that_is_named_for_a_habit_is_one() -> None:
    assert [name for option in FOREIGN_OPTIONS for name in option.ours if name not in FLAGS] == []


def test_every_habit_says_what_there_is_and_no_name_stands_twice() -> None:
    assert [option for option in FOREIGN_OPTIONS if not (option.ours or option.remark)] == []
    for names in (
        [name for option in FOREIGN_OPTIONS for name in getattr(option, side)] for side in ("nanogpt", "torchtitan")
    ):
        assert sorted(names) == sorted(set(names))


def row(option: ForeignOption) -> str:
    cells = [", ".join(f"`{name}`" for name in names) for names in (option.nanogpt, option.torchtitan, option.ours)]
    return "".join(f"| {cell} " if cell else "| " for cell in (*cells, option.remark)) + "|"


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    lines = (ROOT / "docs" / "internals" / "nsa" / "training.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| nanoGPT | torchtitan | here | |") + 2
    assert lines[start : start + len(FOREIGN_OPTIONS)] == [row(option) for option in FOREIGN_OPTIONS]
    assert lines[start + len(FOREIGN_OPTIONS)] == ""


def mistakes(*arguments: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read_settings(arguments, {})
    return str(caught.value).splitlines()


def test_a_name_out_of_habit_is_an_error_that_says_what_stands_for_it_here() -> None:
    typed = ("config/train_gpt2.py", "--max_iters=600", "--wandb_log=True", "--lr_scheduler.warmup_steps", "200")
    assert mistakes(*typed, "--steps", "0") == [
        "config/train_gpt2.py: an option of another program; in nsa.train: --config"
        " (a YAML file with one name: value per line; also CONFIG=FILE)",
        "--max-iters: an option of another program; in nsa.train: --steps (includes the steps before --resume)",
        "--wandb-log: an option of another program; in nsa.train: not supported: the numbers are in training.csv "
        "and evaluation.csv",
        "--lr-scheduler.warmup-steps: an option of another program; in nsa.train: --warmup-steps",
        '--steps: expected a whole number of at least 1, got "0"',
    ]


def test_every_name_of_theirs_is_answered_as_an_option() -> None:
    for option in FOREIGN_OPTIONS:
        for name in (*option.nanogpt, *option.torchtitan):
            flag = f"--{name.replace('_', '-')}"
            if flag not in FLAGS:  # the names that both have
                (told,) = mistakes(name if "FILE" in name else f"{flag}=1")
                assert "in nsa.train: " in told, name


def test_a_key_out_of_habit_in_a_file_is_answered_too(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("max_iters: 5\nblock_size: 64\n", encoding="utf-8")
    assert mistakes("--config", str(path)) == [
        f"{path}: max_iters: no such option; in nsa.train: --steps (includes the steps before --resume)",
        f"{path}: block_size: no such option; in nsa.train: --seq-len",
    ]


def test_a_name_of_nobody_has_its_nearest_and_a_word_alone_is_none() -> None:
    assert replacement_for("frobnicate") is None
    assert mistakes("--learning-rat3", "1") == ["--learning-rat3: no such option; did you mean --learning-rate?"]
    assert mistakes("train") == ["train: expected an option"]


def test_underscores_are_dashes_in_the_name_of_an_option_and_stay_in_its_value() -> None:
    settings = read_settings(("--learning_rate=0.5", "--out_dir", "my_out", "--gc_mode=non_reentrant"), {})
    assert (settings.learning_rate, str(settings.out_dir), settings.gc_mode) == (0.5, "my_out", "non_reentrant")
