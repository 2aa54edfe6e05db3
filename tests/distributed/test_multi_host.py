"""One torchrun per host with unequal numbers of processes, as docs/multi-host.md says; here both "hosts" are this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .launch import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(__file__).resolve().parent / "suites" / "verify_program.py")
TIMEOUT_S = 300


def torchrun(*, host: int, processes: int, port: int) -> subprocess.Popen[str]:
    """The launcher of one host, with the command of the documentation."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)),
        *("--nproc-per-node", str(processes), "--master-addr", "127.0.0.1", "--master-port", str(port)),
        *(PROGRAM, "verify", "--models", "module", "--zero-stages", "1"),
    ]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_hosts_with_two_ranks_and_one() -> None:
    port = free_port()
    launchers = [torchrun(host=0, processes=2, port=port), torchrun(host=1, processes=1, port=port)]
    try:
        outputs = [launcher.communicate(timeout=TIMEOUT_S)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)[-4000:]
    assert "3 ranks:" in outputs[0]
    assert "passed: all 1 are equal" in outputs[0]
    assert "passed:" not in outputs[1]
