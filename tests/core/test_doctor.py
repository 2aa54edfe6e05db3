"""`accelerate-poplar doctor`: what would go wrong is said in plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerate_poplar.cli import main
from accelerate_poplar.device import DeviceFacts
from accelerate_poplar.doctor import ADVICE, FAULT, examine

GIB = 1024**3


def card(name: str, capability: tuple[int, int], *, number: int, free: float = 0.95) -> DeviceFacts:
    return DeviceFacts(
        host="n1",
        device=name,
        memory_bytes=16 * GIB,
        free_bytes=int(16 * GIB * free),
        device_id=f"GPU-{number}",
        capability=capability,
        source="nvml",
    )


def texts(kind: str, **stand_ins: Any) -> str:
    settings: dict[str, Any] = {
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "devices": [card("A100", (8, 0), number=0)],
        "which": lambda name: f"/usr/bin/{name}",
        "shared_memory_bytes": 8 * GIB,
        "cache": Path.home() / ".cache",
    }
    return "\n".join(f.text for f in examine(**(settings | stand_ins)) if f.kind == kind)


def test_nothing_wrong() -> None:
    assert texts(FAULT) == ""
    assert texts(ADVICE) == ""


@pytest.mark.scenario(13)
def test_a_faulty_version() -> None:
    assert "0.18.7" in texts(FAULT, versions={"deepspeed": "0.18.7"})


@pytest.mark.scenario(32)
def test_two_ranks_on_one_card() -> None:
    assert "GPU-3" in texts(FAULT, devices=[card("A100", (8, 0), number=3)] * 2)


@pytest.mark.scenario(43)
def test_one_card_without_bf16() -> None:
    found = texts(ADVICE, devices=[card("A100", (8, 0), number=0), card("V100", (7, 0), number=1)])
    assert "V100" in found
    assert "allow_fp16" in found


def test_other_programs_shared_memory_and_compiler() -> None:
    assert "8.0 GiB" in texts(ADVICE, devices=[card("A100", (8, 0), number=0, free=0.5)])
    assert "--shm-size" in texts(ADVICE, shared_memory_bytes=64 * 1024**2)
    assert "c++ and ninja" in texts(ADVICE, which=lambda name: None)


def test_a_broken_setting_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPLAR_EMULATE_SLOWDOWN", "fast")
    assert "POPLAR_EMULATE_SLOWDOWN" in texts(FAULT)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POPLAR_CONFIG", raising=False)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert any(f["text"].startswith("device 0") for f in found["findings"])
    monkeypatch.setenv("POPLAR_CONFIG", "/nowhere.yaml")
    assert main(["doctor"]) == 1
    assert "nowhere.yaml" in capsys.readouterr().out
