"""The small process beside a server that makes sure it ends.

The starter of a server may be a notebook kernel, and kernels get killed. So the starter does not hold the server: it
starts this process, in a session of its own, with nothing but the path of a record. The supervisor starts the server as
the leader of another session, waits, and ends that process group when its last owner is gone, when it is told to
(SIGTERM), or when the machine's available memory falls below the record's floor, since a machine that shares its memory
with the GPU stops answering before any out-of-memory killer wakes. If the supervisor itself is killed the kernel kills
the server (PR_SET_PDEATHSIG), and whoever looks at the records next cleans up the rest.

`python -m sparkmoe.supervisor RECORD` exits with the server's exit status.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from sparkmoe.machine import available_bytes
from sparkmoe.processes import Identity, Record, end_group

_WAKE_S = 0.5
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def supervise(record: Record) -> int:
    """Start the record's server and stay until its group is empty. Returns an exit status (128 + n for signal n)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the group are reaped here, whatever pid 1 does
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    with open(record.log_path, "ab", buffering=0) as log:
        child = subprocess.Popen(
            record.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
        )
        _publish(record, child.pid)
        reason, grace_s = _watch(record, child)
        if reason:
            _note(log, f"\nsparkmoe: stopped: {reason}\n")
        end_group(child.pid, grace_s=grace_s if child.returncode is None else 0.0)
        status = child.wait()
        _reap()
        ended = f"sparkmoe: server ended, exit code {status} after {time.time() - record.started_at:.0f} s\n"
        _note(log, ended)
    return status if status >= 0 else 128 - status


def _note(log: IO[bytes], text: str) -> None:
    """On a full disk the server must end all the same."""
    with contextlib.suppress(OSError):
        log.write(text.encode())


def _publish(record: Record, pid: int) -> None:
    leader, me = Identity.of(pid), Identity.of(os.getpid())
    record.server, record.supervisor = (leader.pid, leader.started_s), (me.pid, me.started_s)
    record.write()


def _watch(record: Record, child: subprocess.Popen[bytes]) -> tuple[str, float]:
    """Sleep until something happens. Returns why the server must end ("" if it ended by itself) and its grace in s."""
    while True:
        woken = signal.sigtimedwait(_WATCHED, _WAKE_S)
        if child.poll() is not None:
            return "", 0.0
        if woken is not None and woken.si_signo != signal.SIGCHLD:
            return "asked to (SIGTERM)", record.grace_s
        if not record.owners():
            return "its last owner is gone", min(record.grace_s, 10.0)
        available = available_bytes()
        if available < record.floor_bytes:
            have, floor = available / 2**30, record.floor_bytes / 2**30
            return f"available memory fell to {have:.1f} GiB, below the floor of {floor:.1f} GiB", 2.0


def _reap() -> None:
    """Collect orphans that became ours."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            return


def main() -> int:
    record = Record.read(Path(sys.argv[1]))
    if record is None:
        return 2
    try:
        return supervise(record)
    finally:
        record.remove()


if __name__ == "__main__":
    sys.exit(main())
