"""`accelerate-poplar profile` under `accelerate launch`, as its help says, and planning with what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from accelerate_poplar import ClusterProfile, find_plan

ROOT = Path(__file__).resolve().parents[2]


def test_profile_then_plan(tmp_path: Path) -> None:
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    command = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    command += ["--config_file", "configs/cpu_two_ranks.yaml", "-m", "accelerate_poplar", "profile"]
    command += ["--model", str(tmp_path), "--global-batch-size", "8", "--zero-stage", "1"]
    command += ["--output", str(tmp_path / "profiles.json")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "POPLAR_EMULATE_SLOWDOWN": "1,2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    profile = ClusterProfile.load(tmp_path / "profiles.json")
    assert profile.world_size == 2
    assert profile.seq_len == 32
    assert profile.emulated
    assert list(profile.zero_stages) == [1]
    assert find_plan(profile, global_batch_size=8, zero_stage=1).global_batch_size == 8
