"""Kernels: nothing is left of those whose owner was killed."""
import fcntl
import os
import signal
import subprocess
import sys
import tempfile

import psutil

from stepscope.runs import jupyter_kernel as kernel


def test_what_a_killed_owner_left_is_ended_and_removed_and_what_a_living_one_has_is_let_be(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    processes = {}
    for name in ("dead", "living"):
        folder = tmp_path / f"{kernel.SOCKETS}{name}"
        folder.mkdir()
        (folder / "owner").touch()
        processes[name] = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True,
                                           env=os.environ | {kernel.MARK: str(folder)})
    (tmp_path / f"{kernel.SOCKETS}without-owner").mkdir()
    (tmp_path / f"{kernel.SOCKETS}pipe").mkdir()
    os.mkfifo(tmp_path / f"{kernel.SOCKETS}pipe" / "owner")  # opening this would wait for ever
    with (tmp_path / f"{kernel.SOCKETS}living" / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        kernel.clear_dead()
        assert processes["dead"].wait(30) < 0 and psutil.pid_exists(processes["living"].pid) and processes["living"].poll() is None
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{kernel.SOCKETS}living", f"{kernel.SOCKETS}without-owner"]
    processes["living"].kill()
    processes["living"].wait()


def test_a_process_in_the_middle_of_exec_has_no_environment_yet_and_is_looked_at_again(tmp_path, monkeypatch):
    process = subprocess.Popen(["sleep", "1000"])
    seen = tmp_path / str(process.pid)  # what /proc shows of it in that moment, which nothing can make last
    seen.mkdir()
    (seen / "environ").touch()
    (seen / "exe").symlink_to("/bin/sleep")
    (seen / "stat").write_text(f"{process.pid} (sleep) R{' 0' * 49}")
    monkeypatch.setattr(kernel, "PROC", tmp_path)
    with monkeypatch.context() as later:
        later.setattr(kernel.time, "sleep", lambda seconds: (seen / "environ").write_text(f"A=1\0{kernel.MARK}={tmp_path}\0"))
        kernel.end_marked(tmp_path)
    try:
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()


def test_what_lives_without_an_environment_or_has_ended_is_not_waited_for(monkeypatch):
    bare = subprocess.Popen(["sleep", "1000"], env={})
    over = subprocess.Popen(["true"])
    os.waitid(os.P_PID, over.pid, os.WEXITED | os.WNOWAIT)
    try:
        while kernel._bears(kernel.PROC / str(bare.pid), b"A=1") is None:  # it is not yet what it is to be
            pass
        assert kernel._bears(kernel.PROC / str(bare.pid), b"A=1") is False
        assert kernel._bears(kernel.PROC / str(over.pid), b"A=1") is False
    finally:
        bare.kill()
        bare.wait()
        over.wait()
