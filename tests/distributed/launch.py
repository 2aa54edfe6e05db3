"""Starts real ranks on this machine: one process each, gloo, no accelerator.

A launch costs several seconds, so one launch runs a whole suite of checks; rank 0 collects the results of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class RankOutput:
    """How one rank ended."""

    rank: int
    code: int | None
    text: str


class LaunchError(AssertionError):
    """A rank failed or did not end in time; the message names it and shows its output."""


def free_port() -> int:
    """A port nobody listens on, below those a system hands out by itself: it could give one of these to another socket."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(
    command: list[str], *, world_size: int, timeout_s: float, folder: Path, env: dict[str, str] | None = None
) -> list[RankOutput]:
    """Run a command once per rank and wait for all of them; the survivors of a time-out are ended."""
    port = free_port()
    processes = []
    for rank in range(world_size):
        variables = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **(env or {}),
        }
        log = (folder / f"rank{rank}.log").open("w")
        processes.append(
            (subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT), log)
        )
    codes = _wait([process for process, _ in processes], timeout_s)
    for _, log in processes:
        log.close()
    texts = [(folder / f"rank{rank}.log").read_text() for rank in range(world_size)]
    return [RankOutput(rank, code, text) for rank, (code, text) in enumerate(zip(codes, texts, strict=True))]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    deadline = time.monotonic() + timeout_s
    grace: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if grace is None and any(process.poll() not in (None, 0) for process in processes):
            # A rank has failed: the others are given a moment to notice by themselves.
            grace = now + 30.0
        if now > min(deadline, grace or deadline):
            break
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    return codes


def run_suite(
    suite: str, *, world_size: int, folder: Path, timeout_s: float = 300.0, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run `tests/distributed/suites/<suite>.py` on every rank and return what rank 0 wrote.

    A suite is a script that takes the result file's path as its only argument.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    command = [sys.executable, str(HERE / "suites" / f"{suite}.py"), str(result)]
    outputs = start_ranks(command, world_size=world_size, timeout_s=timeout_s, folder=folder, env=env)
    failed = [output for output in outputs if output.code != 0]
    if failed:
        states = ", ".join(f"rank {o.rank}: {'timed out' if o.code is None else f'exit {o.code}'}" for o in failed)
        # The rank that failed by itself comes last, where a reader looks first; the others only lost it.
        failed.sort(key=lambda output: (output.code is not None, "another rank is gone" not in output.text))
        texts = "\n".join(f"--- rank {output.rank} ---\n{output.text[-5000:]}" for output in failed)
        raise LaunchError(f"{suite} on {world_size} ranks: {states}\n{texts}")
    return json.loads(result.read_text())
