"""The script of repro/: it runs the program as the failing probe did, without the harness watching."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.redaction import placeholders

NAME = "repro.py"
_HELD = "\0"  # in place of a blank where no line may break


def repro_script(spec: RunSpec, *, working_dir: str, about: str) -> str | None:
    """None for a launch that is no Python program under torchrun: its command is all there is."""
    if spec.launcher is Launcher.PLAIN:
        return None
    return "\n".join(_lines(spec, working_dir, about)) + "\n"


def repro_command(spec: RunSpec) -> str:
    return f"torchrun --standalone --nproc-per-node={spec.ranks} {NAME}"


def _lines(spec: RunSpec, working_dir: str, about: str) -> Iterator[str]:
    """All that comes from outside is told by `ascii`: a literal of plain characters, whatever it holds."""
    head, *words = spec.program
    module = head == "-m"
    program, args = (words[0], words[1:]) if module else (head, words)
    yield f'"""{_one_line(about)}'
    yield ""
    yield f"    {repro_command(spec)}"
    yield '"""'
    yield ""
    yield "import os"
    yield "import runpy"
    yield "import sys"
    if spec.fault is not None:
        yield "import torch"
    yield ""
    yield f"os.chdir({spec.cwd or working_dir!a})"
    yield f"os.environ.update({dict(spec.env)!a})"
    yield f"sys.argv[1:] = {_list(args)}"
    yield from _filled_in(args, dict(spec.env))
    if spec.fault is not None:
        # A planted fault is no part of the program: the package plants it, as it did in the probe.
        yield "from nsa_harness.faults.plant import plant  # the fault of this scenario was planted on purpose"
        yield f"plant({json.dumps(asdict(spec.fault))!a})"
    if module:
        yield "sys.path.insert(0, os.getcwd())"
        yield f"runpy.run_module({program!a}, run_name='__main__', alter_sys=True)"
        return
    yield f"sys.argv[0] = {program!a}"
    yield f"sys.path[0] = os.path.dirname(os.path.abspath({program!a}))"
    yield f"runpy.run_path({program!a}, run_name='__main__')"


def _filled_in(args: list[str], env: dict[str, str]) -> Iterator[str]:
    """What was taken out of the words and the environment, which whoever runs the script has to know."""
    for variable in placeholders((*args, *env.values())):
        yield f"secret = os.environ[{variable!a}]  # export {variable}=...: the value is in a probe's spec.json"
        yield f"sys.argv = [word.replace('${variable}', secret) for word in sys.argv]"
        yield f"for name in {[*env]!a}:"
        yield f"    os.environ[name] = os.environ[name].replace('${variable}', secret)"


def _list(words: list[str]) -> str:
    """Wrapped, to keep a long command on a screen. A literal holds no blank that a line could break at."""
    body = textwrap.fill(
        " ".join(ascii(word).replace(" ", _HELD) + "," for word in words),
        110,
        break_long_words=False,
        break_on_hyphens=False,
    )
    body = body.replace(_HELD, " ")
    return f"[{body[:-1]}]" if "\n" not in body else "[\n" + textwrap.indent(body, "    ") + "\n]"


def _one_line(text: str) -> str:
    return ascii(text.replace(" \u00b7 ", ", "))[1:-1].replace('"', "'")[:200]
