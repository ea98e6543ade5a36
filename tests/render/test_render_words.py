"""Words for values: units, ranges and certainty."""

from __future__ import annotations

from dataclasses import replace

from render_samples import DEADLOCK, PLACE

from nsa_harness.core.report import Place
from nsa_harness.render.documents.html import MAX_LANES, lanes
from nsa_harness.texts import words


def test_times_read_as_people_say_them() -> None:
    values = (None, float("nan"), 0.0, 0.06, 0.994, 0.996, 14.23, 99.94, 99.96, 600.0, 125.0, 3600.0, 7261.0)
    assert [words.seconds(value) for value in values] == [
        "not known", "not known", "0.00 s", "0.06 s", "0.99 s", "1.0 s", "14.2 s", "99.9 s", "1 min 40 s", "10 min",
        "2 min 5 s", "1 h 0 min", "2 h 1 min",
    ]  # fmt: skip


def test_sizes_are_decimal_and_never_overflow() -> None:
    assert [words.size(value) for value in (None, 0, 412_000_000, 999_600_000, 73_000_000_000)] == [
        "not known", "0 MB", "412 MB", "1.0 GB", "73.0 GB",
    ]  # fmt: skip
    assert words.size(10**4000).endswith("GB")


def test_numbers_keep_five_digits_and_name_what_is_no_number() -> None:
    values = (1.0, 5.5479, 1234567.0, 0.00012345678, float("nan"), float("inf"))
    assert [words.number(value) for value in values] == ["1", "5.5479", "1,234,567", "0.00012346", "nan", "inf"]


def test_ranks_are_joined_to_inclusive_ranges() -> None:
    assert words.ranks([1]) == "rank 1"
    assert words.ranks([5, 0, 2, 1]) == "ranks 0-2, 5"
    assert words.ranks(range(1000)) == "ranks 0-999"


def test_certainty_has_three_words() -> None:
    assert [words.certainty(value) for value in (1.0, 0.9, 0.89, 0.6, 0.59, 0.0)] == [
        "certain", "certain", "likely", "likely", "unknown", "unknown",
    ]  # fmt: skip


def test_exits_name_the_signal() -> None:
    assert [words.exit_word(status) for status in (None, 0, 1, -9, -400)] == [
        "had not exited", "0", "1", "SIGKILL", "signal 400",
    ]  # fmt: skip


def test_the_statement_of_a_place_is_the_last_of_its_lines() -> None:
    assert list(words.numbered_lines(PLACE, PLACE.line)) == [
        "  211 │ if selected.any():",
        "▸ 212 │     dist.all_reduce(usage)",
    ]
    assert list(words.numbered_lines(replace(PLACE, line=9, text="a()\nb()"), 9)) == [
        "  8 │ a()",
        "▸ 9 │ b()",
    ]


def test_a_place_without_a_file_is_named_by_what_is_known() -> None:
    place = Place(module="blocks.3", layer=3, parameter="w_q")
    assert words.place_name(place) == ""
    assert words.place_details(place) == "layer 3 · blocks.3 · parameter w_q"


def test_of_many_ranks_those_that_stand_alike_share_a_lane_with_the_longest_time() -> None:
    standings = tuple(
        replace(DEADLOCK.rank_statuses[0], rank=rank, no_progress_s=1.0 + rank / 10) for rank in range(20)
    )
    assert DEADLOCK.culprit is not None
    culprit = replace(DEADLOCK.culprit, ranks=(3,))
    drawing = lanes(replace(DEADLOCK, rank_statuses=standings, culprit=culprit, last_step=dict.fromkeys(range(20), 3)))
    assert drawing is not None
    assert [(lane.label, lane.caption) for lane in drawing.lanes] == [
        ("ranks 0-2, 4-19", "3 steps done · 2.9 s in all_reduce #14, waits for rank 1"),
        ("rank 3", "3 steps done · 1.3 s in all_reduce #14, waits for rank 1"),
    ]


def test_the_picture_leaves_out_ranks_but_never_a_culprit() -> None:
    count = 100
    standings = tuple(
        replace(DEADLOCK.rank_statuses[0], rank=rank, blocked_in=f"all_reduce #{rank}") for rank in range(count)
    )
    assert DEADLOCK.culprit is not None
    culprit = replace(DEADLOCK.culprit, ranks=(97,))
    outcome = replace(
        DEADLOCK,
        rank_statuses=standings,
        culprit=culprit,
        last_step=dict.fromkeys(range(count), 3),
        victims=tuple(range(97)),
    )
    drawing = lanes(outcome)
    assert drawing is not None
    assert [lane.label for lane in drawing.lanes] == [*(f"rank {rank}" for rank in range(MAX_LANES - 1)), "rank 97"]
    assert drawing.lanes[-1].role == "culprit"
    assert drawing.omitted == count - MAX_LANES


def test_there_is_no_picture_where_nothing_is_known() -> None:
    assert lanes(replace(DEADLOCK, rank_statuses=(), rank_summaries=(), last_step={0: None})) is None
