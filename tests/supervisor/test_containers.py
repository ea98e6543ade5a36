"""Jobs in containers: what they call a file, a process and themselves is found out here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nsa_harness.supervisor.capture.procfs import path_in_process, pid_in_namespace
from nsa_harness.supervisor.capture.syscalls import outer_pid
from nsa_harness.supervisor.storage.sources import text_as_launched

UNSHARE = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--map-root-user", "--mount-proc"]
MADE = shutil.which("unshare") and subprocess.run([*UNSHARE, "true"], check=False, capture_output=True)
in_containers = pytest.mark.skipif(not MADE or MADE.returncode != 0, reason="no namespace may be made here")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Process 70 is 1 in its container, and its child 71 is 5 there; we are `self`."""
    for name, mount in (("self", "mnt:[1]"), ("70", "mnt:[2]"), ("71", "mnt:[2]"), ("80", "mnt:[1]")):
        (tmp_path / name / "ns").mkdir(parents=True)
        (tmp_path / name / "ns" / "mnt").symlink_to(mount)
        (tmp_path / name / "cwd").symlink_to("/work")
    for name in ("self", "80"):
        (tmp_path / name / "root").symlink_to("/")
    (tmp_path / "70" / "root").symlink_to(tmp_path / "inside")
    (tmp_path / "70" / "status").write_text("Name:\tpython\nNSpid:\t70\t1\n")
    (tmp_path / "71" / "status").write_text("Name:\tpython\nNSpid:\t71\t5\n")
    (tmp_path / "70" / "task" / "70").mkdir(parents=True)
    (tmp_path / "70" / "task" / "70" / "children").write_text("71 ")
    (tmp_path / "80" / "status").write_text("Name:\tpython\nNSpid:\t80\n")
    return tmp_path


def test_a_file_of_another_root_lies_below_it_and_one_of_ours_where_it_says(proc: Path) -> None:
    assert path_in_process(70, "/app/train.py", proc) == proc / "70" / "root" / "app" / "train.py"
    assert path_in_process(70, "train.py", proc) == proc / "70" / "root" / "work" / "train.py"
    assert path_in_process(80, "/app/train.py", proc) == Path("/app/train.py")
    assert path_in_process(99, "/app/train.py", proc) == Path("/app/train.py")


def test_no_link_of_a_container_leads_out_of_it(proc: Path) -> None:
    inside = proc / "inside"
    (inside / "srv" / "app").mkdir(parents=True)
    (inside / "app").symlink_to("/srv/app")
    (inside / "srv" / "app" / "secret.py").symlink_to("/etc/passwd")
    (inside / "srv" / "app" / "up.py").symlink_to("../../../../etc/passwd")
    (inside / "srv" / "app" / "ring").symlink_to("ring")
    root = proc / "70" / "root"
    assert path_in_process(70, "/app/train.py", proc) == root / "srv" / "app" / "train.py"
    assert path_in_process(70, "/app/secret.py", proc) == root / "etc" / "passwd"
    assert path_in_process(70, "/app/up.py", proc) == root / "etc" / "passwd"
    assert path_in_process(70, "/app/ring", proc) == root / "srv" / "app" / "ring"
    assert path_in_process(70, "/../../x.py", proc) == root / "x.py"


def test_a_process_and_its_children_have_other_names_in_a_container(proc: Path) -> None:
    assert (pid_in_namespace(70, proc), pid_in_namespace(80, proc)) == (1, 80)
    assert (outer_pid(70, 5, proc), outer_pid(70, 6, proc), outer_pid(80, 5, proc)) == (71, 6, 5)


@in_containers
def test_of_a_process_in_a_container_sources_are_read_as_it_sees_them(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    code = f"mount -t tmpfs none {shared}; echo 'print(1)' > {shared}/train.py; echo; read line"
    with subprocess.Popen([*UNSHARE, "sh", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as outside:
        assert outside.stdout is not None
        outside.stdout.readline()
        (inside,) = psutil.Process(outside.pid).children()
        assert pid_in_namespace(inside.pid) == 1
        assert text_as_launched(f"{shared}/train.py", None) == ""
        assert text_as_launched(f"{shared}/train.py", None, inside.pid) == "print(1)\n"
        outside.communicate(b"\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look as somebody else")
@in_containers
def test_a_process_in_somebody_elses_container_is_one_line_that_says_so() -> None:
    with subprocess.Popen([*UNSHARE, "sh", "-c", "echo; read line"], stdin=-1, stdout=-1) as outside:
        assert outside.stdout is not None
        outside.stdout.readline()
        (inside,) = psutil.Process(outside.pid).children()
        code = (
            "import os; from nsa_harness.errors import NoSuchJob\n"
            "from nsa_harness.supervisor.observe.attach import find_job\n"
            "os.setgid(65534); os.setuid(65534)\n"
            f"try: find_job({inside.pid})\n"
            "except NoSuchJob as error: print(error)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        outside.communicate(b"\n")
    assert (done.stdout, done.stderr) == (
        f"attach: process {inside.pid} (1 in its container) belongs to user root and may not be inspected;"
        f" `sudo nsa-harness attach {inside.pid}`\n",
        "",
    )
