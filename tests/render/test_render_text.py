"""The escape: whatever a program prints, a reader's terminal, page and parser stay unharmed."""

from __future__ import annotations

import html.parser
import unicodedata
from dataclasses import replace
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from render_samples import DEADLOCK, PLACE, POISON

from nsa_harness.render.text import (
    BLOCK_LINES,
    LIMIT,
    ascii_only,
    escape,
    escape_block,
    escaped,
    link_target,
    markdown,
    markdown_code,
    markdown_fence,
    markdown_link,
    markdown_prose,
    with_code,
)

# All characters, surrogates too, and the pieces that make terminal sequences more often than chance would.
PIECES = st.sampled_from(
    ["\x1b", "[", "]", "31m", "\x9b", "0;t", "\x07", "\x1b\\", "\n", "\r\n", "\t", "`", "|", "\u202e"]
)
SIGNS = st.text("`*_~#<>&;|\\[]()!:+-=.1ax$\"' /", max_size=30)
HOSTILE = st.lists(st.one_of(PIECES, st.text(st.characters(), max_size=5)), max_size=30).map("".join)
MARKED = st.one_of(HOSTILE, SIGNS)


@given(HOSTILE)
def test_nothing_that_steers_a_terminal_or_hides_text_is_left(text: str) -> None:
    left = {unicodedata.category(sign) for sign in escape(text)}
    assert left.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})


@given(HOSTILE)
def test_a_text_is_one_line_and_a_block_breaks_only_at_line_feeds(text: str) -> None:
    assert len(escape(text).splitlines()) <= 1
    block = escape_block(text)
    assert block.splitlines() == block.split("\n") or block == ""


@given(HOSTILE)
def test_escaping_twice_changes_nothing_more(text: str) -> None:
    assert escape(escape(text)) == escape(text)
    assert escape_block(escape_block(text)) == escape_block(text)


@given(HOSTILE)
def test_an_escaped_text_survives_xml(text: str) -> None:
    element = ElementTree.Element("a")
    element.text = escape(text)
    assert (ElementTree.fromstring(ElementTree.tostring(element, "unicode")).text or "") == escape(text)


@given(HOSTILE)
def test_an_escaped_text_can_be_written_in_utf_8_and_in_ascii(text: str) -> None:
    assert escape(text).encode().decode() == escape(text)
    assert ascii_only(escape(text)).isascii()


@given(HOSTILE, st.sampled_from(["text", "sh"]))
def test_no_text_closes_the_fence_around_it(text: str, language: str) -> None:
    opening, *body, closing = markdown_fence(text, language)
    assert opening == closing + language
    assert all(closing not in line for line in body)


@given(HOSTILE)
def test_a_table_cell_holds_no_bare_pipe(text: str) -> None:
    for cell in (markdown(text), markdown_code(text, in_table=True)):
        assert (
            all(cell[index - 1] == "\\" for index, sign in enumerate(cell) if sign == "|" and index) or "|" not in cell
        )
        assert not cell.startswith("|")


class _Shown(html.parser.HTMLParser):
    """The text and the elements of what Markdown renders."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs  # the elements are what counts here
        self.tags.append(tag)


def _shown(source: str) -> _Shown:
    shown = _Shown()
    shown.feed(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(source))
    shown.close()
    return shown


@given(MARKED)
def test_markdown_renders_exactly_the_text(text: str) -> None:
    shown = _shown(markdown(text))
    assert shown.text.split() == escape(text).split()
    assert set(shown.tags) <= {"p"}


@given(MARKED)
def test_a_table_row_shows_its_cells_and_nothing_else(text: str) -> None:
    cells = (markdown(text), markdown_code(text, in_table=True), markdown_link(text, "x"))
    shown = _shown(f"| a | b | c |\n| --- | --- | --- |\n| {' | '.join(cells)} |\n")
    assert shown.text.split() == ["a", "b", "c", *escape(text).split() * 3]
    assert [tag for tag in shown.tags if tag not in ("table", "thead", "tbody", "tr", "th", "td")] == ["code", "a"]


@given(HOSTILE)
def test_a_link_label_cannot_end_its_link(text: str) -> None:
    label = markdown_link(text, "x").removesuffix("](x)").removeprefix("[")
    unescaped = label.replace("\\\\", "")
    assert all(unescaped[index - 1] == "\\" for index, sign in enumerate(unescaped) if sign in "[]")


def test_words_of_the_field_read_the_same_in_markdown() -> None:
    plain = "rank 1 never entered all_reduce #42 (group dp) -> layers 0-5 [0:6], 14.2 s, \\x1b, a & b"
    assert markdown(plain) == plain


def test_a_backslash_at_the_end_escapes_nothing_that_follows() -> None:
    assert markdown_link("a\\", "x") == "[a\\\\](x)"


def test_what_means_something_to_markdown_is_shown_as_it_is() -> None:
    assert markdown("# a") == "\\# a"
    assert markdown("1. a") == "1\\. a"
    assert markdown("14.2 s") == "14.2 s"
    assert markdown("<b> &lt; *x* _y_ `z` [a](b) a|b $x$ ~s~") == (
        "&lt;b> &amp;lt; \\*x\\* \\_y\\_ \\`z\\` [a\\](b) a\\|b \\$x\\$ \\~s\\~"
    )


def test_a_long_text_keeps_both_ends_and_says_what_is_left_out() -> None:
    text = escape("a" * 3000 + "b" * 10_000)
    assert len(text) <= LIMIT
    assert text.startswith("a" * 3000 + " … 9333 characters cut … bbb")


def test_a_long_block_keeps_its_last_lines() -> None:
    block = escape_block("\n".join(map(str, range(100))))
    assert block.split("\n") == [str(number) for number in range(100 - BLOCK_LINES, 100)]


def test_colours_titles_and_hyperlinks_vanish_and_their_text_stays() -> None:
    assert (
        escape("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x9b32mgreen\x1b(B") == "red link green"
    )


def test_a_sequence_without_an_end_shows_its_bytes() -> None:
    assert escape("\x1b]0;title and more") == "0;title and more"
    assert escape("a\x1b") == "a\\x1b"


def test_every_text_in_a_value_is_escaped_and_source_keeps_its_lines() -> None:
    value = escaped(
        replace(
            DEADLOCK,
            metrics={POISON: 1.0},
            spec=replace(DEADLOCK.spec, notes=(POISON,)),
        )
    )
    assert value.spec.notes == (escape(POISON),)
    assert list(value.metrics) == [escape(POISON)]
    assert value.culprit is not None
    assert value.culprit.place == PLACE


def test_links_lead_only_into_the_run_directory() -> None:
    assert link_target("dumps/rank1.txt:8") == "dumps/rank1.txt"
    assert link_target("a b(1)#?.txt") == "a%20b%281%29%23%3F.txt"
    assert link_target("javascript:alert(1)") == "javascript%3Aalert%281%29"
    outside = ("../x", "a/../../x", "/etc/passwd", "//host/x", "\\\\host\\x", "a\\..\\..\\x", "", ":8")
    assert [link_target(path) for path in outside] == [None] * len(outside)


def test_a_terminal_without_our_signs_gets_stand_ins_of_the_same_width() -> None:
    assert ascii_only("━ ▸ 212 │ x ◀ culprit · a → b — é") == "= > 212 | x < culprit - a > b - \\xe9"


def test_backticks_in_pairs_are_code_in_markdown_and_a_single_one_is_text() -> None:
    assert markdown_prose("only under `if rank == 0` (a_b.py:1), *not* ` here ` or `a|b`", in_table=True) == (
        "only under `if rank == 0` (a_b.py:1), \\*not\\* `here` or `a\\|b`"
    )
    assert markdown_prose("- a ` alone") == "\\- a \\` alone"


@given(MARKED)
def test_markdown_with_code_renders_the_text_without_its_backticks(text: str) -> None:
    shown, plain = _shown(markdown_prose(text)), "".join(part for part, _ in with_code(escape(text)))
    assert "".join(shown.text.split()) == "".join(plain.split())
    assert set(shown.tags) <= {"p", "code"}
