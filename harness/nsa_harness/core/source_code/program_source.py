"""Search the stored source code of the user's program for branches, loops, callers, locks and queues."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath

from nsa_harness.core.evidence.evidence import Frame, Source
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Branch, Excerpt, Loop, LoopNode

MAX_CALLS = 3  # longest chain of calls that is followed from a line of the evidence
STORE_SETTERS = frozenset({"set", "add", "append", "compare_set", "queue_push"})
# (file, function) of the library in which a thread waits -> methods that end the wait. Events and conditions are
# missing, because the waiting thread may itself be at fault: it may have come too late.
_ENDS_OF_WAITS = {
    ("queue.py", "get"): ("put", "put_nowait"),
    ("queue.py", "put"): ("get", "get_nowait"),
    ("queue.py", "join"): ("task_done",),
}

Line = Place | Frame
_NOWHERE = Excerpt(file="", first=0, text="")


@dataclass(frozen=True)
class ProgramSource:
    """The stored functions of the user's program, with methods to search them."""

    sources: tuple[Source, ...] = ()

    @cached_property
    def excerpts(self) -> tuple[Excerpt, ...]:
        return tuple(map(Excerpt.from_source, self.sources))

    def excerpt(self, line: Line) -> Excerpt | None:
        """Return the smallest stored excerpt that contains the line, or None if no excerpt does."""
        return self.excerpt_at(line.file, line.line)

    def excerpt_at(self, file: str | None, line: int | None) -> Excerpt | None:
        if file is None or line is None:
            return None
        candidates = [excerpt for excerpt in self._by_file.get(file, ()) if excerpt.first <= line <= excerpt.last]
        return min(candidates, key=lambda excerpt: len(excerpt.text), default=None)

    def _around(self, line: Line) -> Excerpt:
        """Return the smallest stored excerpt that contains the line, or an empty one if there is none."""
        return self.excerpt(line) or _NOWHERE

    @cached_property
    def _by_file(self) -> dict[str, list[Excerpt]]:
        files: dict[str, list[Excerpt]] = {}
        for excerpt in self.excerpts:
            files.setdefault(excerpt.file, []).append(excerpt)
        return files

    @cached_property
    def _by_name(self) -> dict[str, list[Excerpt]]:
        names: dict[str, list[Excerpt]] = {}
        for excerpt in self.excerpts:
            names.setdefault(excerpt.name, []).append(excerpt)
        return names

    def only_function(self, name: str | None) -> Excerpt | None:
        """Return the stored function with this name. Return None if there is none or more than one."""
        same = self._by_name.get(name or "", ())
        return same[0] if len(same) == 1 else None

    def same_file(self, excerpt: Excerpt) -> Sequence[Excerpt]:
        return self._by_file[excerpt.file]

    def statement(self, place: Line) -> str | None:
        """Return the source text of the line, or None if it is not stored."""
        excerpt = self.excerpt(place)
        if excerpt is None or place.line is None:
            return None
        return excerpt.text.splitlines()[place.line - excerpt.first].strip()[:200]

    def same_function(self, line: Line, other: Line) -> bool:
        """Return whether both lines are in the same stored function, or both are outside of functions in one file."""
        excerpt, other_excerpt = self.excerpt(line), self.excerpt(other)
        if excerpt is None or other_excerpt is None or excerpt.file != other_excerpt.file:
            return False
        # The statements of a file outside of functions are stored one by one.
        return excerpt is other_excerpt or (excerpt.function is None and other_excerpt.function is None)

    # Branches and loops.

    def branches(self, place: Line) -> tuple[Branch, ...]:
        """Return the branches that determine whether the line is reached."""
        return self._around(place).branches(place.line or 0)

    def handlers(self, place: Line) -> tuple[Branch, ...]:
        """Return the exception handlers in the innermost loop around the line, or else in the line's function."""
        return self._around(place).handlers(place.line or 0)

    def handler_that_continues(self, place: Line) -> Branch | None:
        """Return the nearest handler that catches exceptions from the line and does not raise, or None if there is
        none.
        """
        return self._around(place).handler_that_continues(place.line or 0)

    def loops_around(self, place: Line) -> tuple[Loop, ...]:
        """Return the loops that contain the line, innermost first."""
        return self._around(place).loops_around(place.line or 0)

    def loops_left(self, inside: Line, outside: Line) -> tuple[Loop, ...]:
        """Return the loops that contain `inside` and end before `outside`, innermost first."""
        if not self.same_function(inside, outside):
            return ()
        return tuple(loop for loop in self.loops_around(inside) if (outside.line or 0) > loop.last)

    def loop_line(self, frame: Frame) -> int | None:
        """Return the first line of the innermost loop that contains the frame, or None if there is none."""
        excerpt = self._around(frame)
        loop = next((block for block in excerpt.blocks_around(frame.line) if isinstance(block, LoopNode)), None)
        return excerpt.line_of(loop) if loop else None

    def opens_block_around(self, first: Line | None, second: Line | None) -> bool:
        """Return whether the first line opens a `with` block that contains the second line."""
        if first is None or second is None or not self.same_function(first, second):
            return False
        excerpt = self._around(first)
        begins, inside = ((each.line or 0) + 1 - excerpt.first for each in (first, second))
        blocks = [node for node in excerpt.nodes if isinstance(node, ast.With)]
        return any(block.lineno == begins < inside <= (block.end_lineno or 0) for block in blocks)

    def is_later_statement(self, branch: Branch, line: Line) -> bool:
        """Return whether the line is in the body of the `if` in `branch`, but after the first statement of this
        body.
        """
        excerpt = self.excerpt(line)
        if excerpt is None or excerpt is not self.excerpt_at(branch.file, branch.line):
            return False
        at = (line.line or 0) + 1 - excerpt.first
        tests = [block for block in excerpt.blocks_around(line.line or 0) if isinstance(block, ast.If)]
        matching_tests = [test for test in tests if excerpt.line_of(test) == branch.line]
        return any((test.body[0].end_lineno or 0) < at <= (test.body[-1].end_lineno or 0) for test in matching_tests)

    def deciding_branch(self, reached_line: Line, other: Line | None, *, same_rank: bool = False) -> Branch | None:
        """Return the branch that explains why one rank reached a line and another did not.

        `other` is the line of the other rank in the same function, or None if it has left the function. With
        `same_rank`, conditions on the rank are ignored, because the other rank has reached the line before.
        """
        if other is not None and not self.same_function(reached_line, other):
            return None
        other_branches = self.branches(other) if other is not None else ()
        within = {branch.line for branch in other_branches if not branch.leaves_block}
        shared_lines = {branch.line for branch in other_branches} - self._deciding_lines(reached_line, other)
        own = [branch for branch in self.branches(reached_line) if not (same_rank and branch.reads_rank)]
        own = [
            branch
            for branch in own
            if branch.line not in shared_lines
            or (branch.leaves_block and (branch.line in within or not branch.leaves_function))
        ]
        own = [branch for branch in own if branch.may_differ] or own
        around = [branch for branch in own if not branch.leaves_block]
        inside = [branch for branch in own if branch.leaves_block and branch.line in within]
        return next(iter([*inside, *around, *reversed(own)]), None)

    def are_alternatives(self, path: Sequence[Line | None], other: Sequence[Line | None]) -> bool:
        """Return whether a rank might take only one of two call paths, because of a condition.

        Each path starts with its outermost line. The result is also True if the stored source does not show how the two
        paths are related, and if both end at the same line, which callers may reach in several ways.
        """
        ends = [(path[-1].file, path[-1].line) for path in (path, other) if path and path[-1] is not None]
        if len(ends) < 2 or ends[0] == ends[1]:
            return True
        for line, other_line in zip(path, other, strict=False):
            if line is None or other_line is None:
                return True
            if (line.file, line.line) != (other_line.file, other_line.line):
                excerpt = self.excerpt(line)
                is_known = excerpt is not None and excerpt is self.excerpt(other_line)
                return not is_known or self._around(line).are_alternatives(line.line or 0, other_line.line or 0)
        return True

    def _deciding_lines(self, line: Line, other: Line | None) -> set[int]:
        """Return the lines of the `if` statements that place the two lines in different branches."""
        if other is None or not self.same_function(line, other):
            return set()
        excerpt = self._around(line)
        return {excerpt.line_of(test) for test in excerpt.tests_between(line.line or 0, other.line or 0)}

    def chooses_between(self, branch: Branch, line: Line, other: Line) -> bool:
        """Return whether the branch is an `if` that places the two lines in different branches."""
        return branch.line in self._deciding_lines(line, other)

    def condition_around_only(self, line: Line | None, other: Line) -> Branch | None:
        """Return the nearest condition that contains `line` but not `other`, or None if there is none."""
        if line is None or not self.same_function(line, other):
            return None
        shared_lines = {branch.line for branch in self.branches(other)}
        own = (
            branch
            for branch in self.branches(line)
            if not branch.leaves_block and branch.may_differ and branch.line not in shared_lines
        )
        return next(own, None)

    # Calls.

    def guard(self, place: Line) -> Branch | None:
        """Return the condition around the line, or else around the only call to the line's function."""
        excerpt, visited_texts = self.excerpt(place), set[str]()
        while excerpt is not None and excerpt.text not in visited_texts:
            visited_texts.add(excerpt.text)
            branch = next(
                (branch for branch in self.branches(place) if not branch.leaves_block and branch.may_differ), None
            )
            calls = [] if branch is not None else list(self._callers(excerpt))
            if len(calls) != 1:
                return branch
            place = calls[0]
            excerpt = self.excerpt(place)
        return None

    def only_call_path(self, place: Place) -> Iterator[Place]:
        """Yield the line, then the only line that calls its function, and so on outwards.

        The path ends at a function that does not have exactly one caller in its file.
        """
        for _ in range(MAX_CALLS):
            yield place
            excerpt = self.excerpt(place)
            calls = list(self._callers(excerpt)) if excerpt else []
            if len(calls) != 1:
                return
            place = calls[0]

    def _callers(self, callee: Excerpt) -> Iterator[Place]:
        for excerpt in self.same_file(callee):
            lines = (line for line, name in excerpt.calls if name == callee.name)
            yield from (Place(file=excerpt.file, line=line, function=excerpt.name) for line in lines)

    def path_to_call(self, frames: Sequence[Frame], functions: Collection[str]) -> tuple[Frame, ...]:
        """Return the outermost frames up to the first one that calls any of `functions`, or () if none does.

        `frames` are outermost first. The last returned frame is moved to the line of the call.
        """
        names = {function.rpartition(".")[2] for function in functions}
        for at, frame in enumerate(frames):
            lines = [line for line, name in self._around(frame).calls if name in names]
            if lines:
                return (*frames[:at], replace(frame, line=lines[0]))
        return ()

    def branch_around_module(self, path: str) -> Branch | None:
        """Return the branch that determines whether the module at `path` is called, or None if there is none.

        For y_embed.proj.0 this is the branch around self.proj(...), if only one line calls it.
        """
        for name in reversed(path.split(".")):
            call_places = [
                Place(file=excerpt.file, line=excerpt.line_of(call))
                for excerpt in self.excerpts
                for call in excerpt.method_calls((name,))
                if ast.unparse(call.func) == f"self.{name}"
            ]
            if call_places:
                return self.deciding_branch(call_places[0], None) if len(call_places) == 1 else None
        return None

    def reentrant_checkpoint(self) -> Place | None:
        """Return the only line with `use_reentrant=True`, or None unless there is exactly one."""
        calls = [
            excerpt.place(node)
            for excerpt in self.excerpts
            for node in excerpt.nodes
            if isinstance(node, ast.Call)
            and any(word.arg == "use_reentrant" and ast.unparse(word.value) == "True" for word in node.keywords)
        ]
        return calls[0] if len(calls) == 1 else None

    def key_setters(self, key: str) -> Iterator[tuple[Place, re.Match[str]]]:
        """Yield the location and the regex match of each line that could set `key` in the distributed store."""
        for excerpt in self.excerpts:
            for call in (node for node in excerpt.nodes if isinstance(node, ast.Call) and node.args):
                sets_key = isinstance(call.func, ast.Attribute) and call.func.attr in STORE_SETTERS
                if sets_key and (match := re.fullmatch(f"(?:.*/)?{_pattern(call.args[0])}", key)):
                    yield Place(file=excerpt.file, line=excerpt.line_of(call)), match

    # Locks and queues.

    def locks_taken_at(self, waiting: Line) -> frozenset[str]:
        """Return the locks that the line acquires, as written in the source."""
        excerpt = self._around(waiting)
        at = (waiting.line or 0) + 1 - excerpt.first
        return frozenset(lock for lock, node in excerpt.locks() if node.lineno == at)

    def lock_taken_by(self, waiting: Line, frames: Sequence[Frame]) -> Place | None:
        """Return the `with` statement in `frames` that holds a lock acquired at `waiting`, or None if none does."""
        locks = self.locks_taken_at(waiting)
        for frame in frames if locks else ():
            excerpt = self._around(frame)
            for lock, node in excerpt.locks():
                if lock in locks and node.lineno < frame.line + 1 - excerpt.first <= (node.end_lineno or 0):
                    return Place(file=frame.file, line=excerpt.line_of(node), function=frame.function)
        return None

    def other_holder_of_lock(self, waiting: Line) -> Place | None:
        """Return the line where another function acquires the same lock, or None unless there is exactly one."""
        excerpt, locks = self.excerpt(waiting), self.locks_taken_at(waiting)
        others = [function for function in self.same_file(excerpt) if function is not excerpt] if excerpt else []
        lock_places = [function.place(by) for function in others for lock, by in function.locks() if lock in locks]
        return lock_places[0] if len({lock_place.function for lock_place in lock_places}) == 1 else None

    def exit_with_lock(self, waiting: Line) -> Place | None:
        """Return the first line that leaves its function while a lock acquired at `waiting` is held, or None if none
        does.
        """
        locks = self.locks_taken_at(waiting)
        exits = (
            Place(file=excerpt.file, line=line + excerpt.first - 1, function=excerpt.name)
            for excerpt in self._by_file.get(waiting.file or "", ())
            for lock, node in excerpt.locks()
            if lock in locks and isinstance(node, ast.Call)
            for line in excerpt.exits_with_lock(lock, node.lineno)
        )
        return next(exits, None)

    def missing_partner(self, frames: Sequence[Frame]) -> Place | None:
        """Return the line at which another thread should end a wait for a queue, or None if it is unknown.

        For a thread in Queue.get this is a put(). If an exception handler skips the put(), it is the line of the
        handler. `frames` are those of the waiting thread, innermost first.
        """
        at = next((at for at, frame in enumerate(frames) if not is_library(frame.file)), 0)
        inside = PurePosixPath(frames[at - 1].file).name, frames[at - 1].function.rpartition(".")[2]
        excerpt = self.excerpt(frames[at]) if at and inside in _ENDS_OF_WAITS else None
        if excerpt is None:
            return None
        waiting = [call for call in excerpt.method_calls((inside[1],)) if excerpt.line_of(call) == frames[at].line]
        objects = {_object(call) for call in waiting}
        on_stack = {stack_excerpt for frame in frames if (stack_excerpt := self.excerpt(frame))}
        # Methods are stored on their own as well, so a whole class is skipped.
        functions = [stored for stored in self.excerpts if stored.tree is not stored.body]
        calls = [
            (function, call.lineno, _object(call) in objects)
            for function in functions
            if function not in on_stack
            for call in function.method_calls(_ENDS_OF_WAITS[inside])
        ]
        calls.sort(key=lambda call: not call[2])  # same object name first; the queue may have another name elsewhere
        entries = (entry for function, line, _ in calls if (entry := _thread_entry(functions, function, line)))
        starts = ((function, line) for function, line in entries if function not in on_stack)
        return next((_early_exit(*start) for start in starts), None)


def _pattern(name: ast.expr) -> str:
    """Return a regular expression that matches every key that the expression could produce."""
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    words = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else "(.+)" for part in parts]
    return "".join(words) if set(words) != {"(.+)"} else "(?!)"


def _object(call: ast.Call) -> str:
    """Return the name of the object whose method is called, such as "ready" for self.ready.get()."""
    expression = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    while isinstance(expression, ast.Subscript):
        expression = expression.value
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")


def _thread_entry(functions: Sequence[Excerpt], excerpt: Excerpt, line: int) -> tuple[Excerpt, int] | None:
    """Return a thread's start function and the line in it that leads to `line`, or None if there is none.

    A thread starts in a function that is passed to a call or named `run`. Only functions with one caller are followed.
    """
    for _ in range(MAX_CALLS):
        if excerpt.name == "run" or any(excerpt.name in function.names_passed_to_calls for function in functions):
            return excerpt, line
        callers = [
            (function, at + 1 - function.first)
            for function in functions
            if function is not excerpt
            for at, name in function.calls
            if name == excerpt.name
        ]
        if len({id(function) for function, _ in callers}) != 1:
            return None
        excerpt, line = callers[0]
    return None


def _early_exit(excerpt: Excerpt, line: int) -> Place:
    return Place(file=excerpt.file, line=excerpt.early_exit(line + excerpt.first - 1), function=excerpt.name)
