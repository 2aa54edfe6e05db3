"""What each of two processes on one GPU does: profile within its own part of the memory, then train at its cap."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accelerate_poplar.comm import connect
from accelerate_poplar.device import synchronize
from tests.core.tiny_models import token_loss
from tests.gpu.one_gpu import new_model, profile, rows

BUDGETS_GIB = (3.0, 1.5)
LARGEST = 512
STEPS = 3


def main() -> None:
    """Let rank 0 write what every rank found."""
    dist.init_process_group("gloo")
    ranks, device = connect(120.0), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    free, _ = torch.cuda.mem_get_info(device)
    measured = profile(
        torch.float32,
        largest_micro_batch=LARGEST,
        ranks=ranks,
        memory_fraction=BUDGETS_GIB[ranks.rank] * 2**30 / free,
        relative_error=0.05,
    )
    cap = measured.stage(0).max_micro_batch_size[ranks.rank]
    found: dict[str, Any] = {
        "cap": cap,
        "budget_bytes": measured.memory[ranks.rank].budget_bytes,
        "points": [p.micro_batch_size for p in measured.ranks[ranks.rank].points],
        "peak_bytes": train(cap, device) if cap else 0,
    }
    reports = ranks.gather(found)
    if ranks.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(reports), encoding="utf-8")
    dist.destroy_process_group()


def train(size: int, device: torch.device) -> int:
    """Peak bytes of a few optimizer steps, gradients averaged over both ranks."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    model = new_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    batch = {key: value.to(device) for key, value in rows(size).items()}
    for _ in range(STEPS):
        torch.autograd.backward(token_loss(model, batch))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("two_ranks.py is started by test_two_ranks.py, once per rank.")
    main()
