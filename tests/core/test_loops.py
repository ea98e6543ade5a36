"""Loops that sleep: which of them another round cannot change."""

from __future__ import annotations

import pytest

from nsa_harness.core.source_code.loops import innermost_loop, only_polls, only_reports

TEXT = """
def wait_for(flag, batches):
    for batch in batches:
        while not flag.raised_:  # nobody sets it
            time.sleep(0.01)
    while True:
        def later():
            time.sleep(1)
"""


@pytest.mark.parametrize(
    ("line", "loop"),
    [(5, "while not flag.raised_:\n    time.sleep(0.01)"), (2, ""), (8, ""), (99, "")],
    ids=["innermost", "none", "another function", "beyond the end"],
)
def test_the_innermost_loop_of_a_function_is_told(line: int, loop: str) -> None:
    assert innermost_loop(TEXT, line) == loop
    assert innermost_loop("while True:\n  while while", 2) == ""
    assert innermost_loop("while True:\n" + 2000 * "    f(x)\n", 3) == "", "too long to be kept"


@pytest.mark.parametrize(
    ("loop", "looks"),
    [
        ("while not flag.raised_:\n    time.sleep(0.01)", True),
        ("while True:\n    if done or len(box['a']) > 2:\n        break\n    sleep(1)", True),
        ("while not os.path.exists(path):\n    time.sleep(1)", False),
        ("while not done and time.time() < end:\n    time.sleep(1)", False),
        ("while tries < 9:\n    tries += 1\n    time.sleep(1)", False),
        ("while not shared.value:\n    time.sleep(1)", False),
        ("for _ in range(9):\n    time.sleep(1)", False),
        ("while not", False),
        ("", False),
    ],
)
def test_a_loop_that_only_looks_reads_objects_of_the_process_and_sleeps(loop: str, looks: bool) -> None:
    assert only_polls(loop) is looks


@pytest.mark.parametrize(
    ("loop", "reports"),
    [
        ("while not stop.wait(5):\n    with open(p, 'a') as log:\n        log.write(f'{time.time()}')", True),
        ("while True:\n    beats += 1\n    logger.info('alive %d', beats)\n    time.sleep(1)", True),
        ("while True:\n    if os.path.exists(path):\n        event.set()\n    time.sleep(1)", False),
        ("while True:\n    poll()\n    time.sleep(1)", False),
        ("while True:\n    with lock:\n        time.sleep(1)", False),
        ("while beats < 9:\n    beats += 1\n    time.sleep(1)", False),
        ("while now() < end:\n    time.sleep(1)", False),
    ],
)
def test_a_loop_that_only_reports_does_the_same_each_round_and_decides_nothing(loop: str, reports: bool) -> None:
    assert only_reports(loop) is reports
