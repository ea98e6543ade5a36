"""What may have become of a file of a stored run: cut, flipped, replaced, of other types, or no file any more."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], None]

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 1 << 40, 1 << 62, 1 << 70, -(1 << 63), 10**400, 1e308, -1.5, float("nan"), float("inf")),
    *("", "x", "-1", "\0", "../../x", "x" * 5000, "\ud800", "\x1b[2J"),
    *([], {}, [[]], [None], {"": {}}, ["x"] * 300, {"event": "exit"}),
)


def cut(path: Path, source: random.Random) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: source.randrange(len(whole) + 1)])


def cut_in_front(path: Path, source: random.Random) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[source.randrange(len(whole) + 1) :])


def flipped(path: Path, source: random.Random) -> None:
    """Eight bits; half of them where something is written: a board is mostly empty."""
    whole = bytearray(path.read_bytes())
    written = [place for place, byte in enumerate(whole) if byte]
    for number in range(8 if written else 0):
        place = source.choice(written) if number % 2 else source.randrange(len(whole))
        whole[place] ^= 1 << source.randrange(8)
    path.write_bytes(whole)


def mistyped(path: Path, source: random.Random) -> None:
    """One character that JSON gives a meaning to, in place of another."""
    whole = path.read_bytes()
    place = source.randrange(len(whole) + 1)
    path.write_bytes(whole[:place] + bytes([source.choice(b'0129,:"[]{}naNE-')]) + whole[place + 1 :])


def emptied(path: Path, _: random.Random) -> None:
    path.write_bytes(b"")


def noise(path: Path, source: random.Random) -> None:
    path.write_bytes(source.randbytes(4096))


def endless_line(path: Path, _: random.Random) -> None:
    path.write_bytes(b"x" * (9 << 20) + b"\n" + path.read_bytes())


def nested(path: Path, _: random.Random) -> None:
    path.write_bytes(b"[" * 100_000 + b"\n" + path.read_bytes())


def sparse(path: Path, _: random.Random) -> None:
    """A terabyte that takes no room."""
    os.truncate(path, 1 << 40)


def other_values(path: Path, source: random.Random) -> None:
    """Some values of the file's JSON become hostile ones; a file that holds none is flipped."""
    lines = path.read_text(errors="replace").splitlines()
    whole = [_parsed(path.read_text(errors="replace"))]
    documents = whole if whole != [None] else [_parsed(line) for line in lines]
    if all(one is None for one in documents):
        flipped(path, source)
        return
    changed = [_changed(one, source) if source.random() < 0.7 or one is documents[-1] else one for one in documents]
    path.write_text("\n".join(json.dumps(one) for one in changed) + "\n")


def swapped(path: Path, source: random.Random) -> None:
    """What another file of the run holds."""
    others = sorted(one for one in path.parent.rglob("*") if one.is_file() and one != path)
    path.write_bytes(source.choice(others).read_bytes() if others else b"")


def linked_to_itself(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def linked_to_endless(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def a_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    (path / "more").mkdir(parents=True)


def a_pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def gone(path: Path, _: random.Random) -> None:
    path.unlink()


CONTENTS: tuple[Damage, ...] = (
    *(cut, cut_in_front, flipped, flipped, mistyped, emptied, noise, endless_line, nested),
    *(other_values, other_values, other_values, other_values, swapped),
)
PLACES: tuple[Damage, ...] = (linked_to_itself, linked_to_endless, a_folder, a_pipe, gone)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _changed(document: Any, source: random.Random) -> Any:
    """A copy with one to three values, anywhere below, replaced or taken away."""
    changed = json.loads(json.dumps(document))
    places = list(_places(changed))
    for holder, key in source.sample(places, min(len(places), source.randint(1, 3))):
        if isinstance(holder, dict) and source.random() < 0.2:
            holder.pop(key, None)
        else:
            holder[key] = source.choice(HOSTILE)
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)
