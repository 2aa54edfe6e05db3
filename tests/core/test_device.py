"""The right card's memory whatever the order, the visibility and the permissions; and what is checked beforehand."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from accelerate_poplar import preflight as preflight_module
from accelerate_poplar.comm import SingleRank
from accelerate_poplar.device import DeviceFacts, device_facts, peak_flops
from accelerate_poplar.errors import CompatibilityError, ConfigError, RankError
from accelerate_poplar.preflight import agree_on_dtype, different_versions, installed_versions, preflight

from .ranks_in_threads import run_ranks

GIB = 2**30
CARDS = {
    "aaaa": ("NVIDIA A100-SXM4-80GB", 80 * GIB, "00000000:3B:00.0", (8, 0)),
    "bbbb": ("Tesla T4", 16 * GIB, "00000000:86:00.0", (7, 5)),
}


class NVMLError(Exception):
    """As pynvml raises."""


class FakeNvml:
    """NVML of a host with both cards, the T4 first; knows no CUDA_VISIBLE_DEVICES."""

    NVMLError = NVMLError

    def __init__(self, *, forbidden: bool = False, installed: bool = True, by_uuid: bool = True) -> None:
        self.forbidden, self.installed, self.by_uuid = forbidden, installed, by_uuid

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own names
        if not self.installed:
            raise NVMLError("driver not loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int):  # noqa: N802
        raise AssertionError("devices must not be looked up by number")

    def nvmlDeviceGetHandleByUUID(self, uuid: str):  # noqa: N802
        if self.forbidden:
            raise NVMLError("no permission")
        if not self.by_uuid or not uuid.startswith("GPU-") or uuid[4:] not in CARDS:
            raise NVMLError("not found")
        return uuid[4:]

    def nvmlDeviceGetHandleByPciBusId(self, bus: str):  # noqa: N802
        if self.forbidden:
            raise NVMLError("no permission")
        for key, card in CARDS.items():
            if card[2] == bus:
                return key
        raise NVMLError("not found")

    def nvmlDeviceGetMemoryInfo(self, handle: str):  # noqa: N802
        return SimpleNamespace(total=CARDS[handle][1], free=CARDS[handle][1] - 3 * GIB)

    def nvmlDeviceGetName(self, handle: str) -> bytes:  # noqa: N802
        return CARDS[handle][0].encode()


class FakeCuda:
    """CUDA as a process sees it: `visible` lists the cards it was given, in its own order."""

    def __init__(self, *visible: str, total: int | None = None, uuids: bool = True) -> None:
        self.visible, self.total, self.uuids = visible, total, uuids

    def name(self, index: int) -> str:
        return "CUDA's " + CARDS[self.visible[index]][0]

    def memory(self, index: int) -> tuple[int, int]:
        total = self.total or CARDS[self.visible[index]][1]
        return total - GIB, total

    def capability(self, index: int) -> tuple[int, int]:
        return CARDS[self.visible[index]][3]

    def uuid(self, index: int) -> str | None:
        return self.visible[index] if self.uuids else None

    def pci_bus_id(self, index: int) -> str | None:
        return CARDS[self.visible[index]][2]


def facts(index: int, cuda: FakeCuda, nvml: FakeNvml) -> DeviceFacts:
    return device_facts(torch.device("cuda", index), cuda=cuda, nvml=nvml)


@pytest.mark.scenario(31)
@pytest.mark.parametrize("visible", [("aaaa", "bbbb"), ("bbbb", "aaaa"), ("bbbb",), ("aaaa",)])
@pytest.mark.parametrize("by_uuid", [True, False])
def test_every_rank_gets_its_own_cards_memory(visible: tuple[str, ...], by_uuid: bool) -> None:
    cuda = FakeCuda(*visible, uuids=by_uuid)
    for index, card in enumerate(visible):
        found = facts(index, cuda, FakeNvml(by_uuid=by_uuid))
        assert found.device == CARDS[card][0]
        assert found.memory_bytes == CARDS[card][1]
        assert found.free_bytes == CARDS[card][1] - 3 * GIB, "what other programs use is not free"
        assert found.capability == CARDS[card][3]
        assert found.source == "nvml"


@pytest.mark.scenario(32)
@pytest.mark.parametrize("nvml", [FakeNvml(forbidden=True), FakeNvml(installed=False)])
def test_without_permission_torch_is_asked(nvml: FakeNvml) -> None:
    found = facts(0, FakeCuda("bbbb"), nvml)
    assert (found.memory_bytes, found.free_bytes, found.source) == (16 * GIB, 15 * GIB, "cuda")
    assert found.device == "CUDA's Tesla T4"


@pytest.mark.scenario(32)
def test_a_mig_slice_is_not_taken_for_the_whole_card() -> None:
    found = facts(0, FakeCuda("aaaa", total=10 * GIB), FakeNvml())
    assert (found.memory_bytes, found.source) == (10 * GIB, "cuda")


def test_a_host_without_cuda() -> None:
    found = device_facts(torch.device("cpu"))
    assert found.host
    assert found.device
    assert 0 < found.free_bytes <= found.memory_bytes
    assert found.device_id == ""
    assert found.capability is None


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("Tesla T4", 65e12, 8.1e12),
        ("Tesla V100-PCIE-16GB", 125e12, 15.7e12),
        ("Intel(R) Xeon(R) Processor", 0.0, 0.0),
    ],
)
def test_peak_flops(name: str, half: float, single: float) -> None:
    assert peak_flops(name, torch.bfloat16) == half
    assert peak_flops(name, torch.float32) == single


# ---- pre-flight -------------------------------------------------------------------------------------------------


def card(device: str = "Tesla T4", **changes) -> DeviceFacts:
    values = {"host": "n1", "device": device, "memory_bytes": 1, "free_bytes": 1, "capability": (7, 5)}
    return DeviceFacts(**{**values, **changes})


@pytest.mark.scenario(32)
def test_two_ranks_on_one_device_are_explained() -> None:
    def work(ranks):
        return preflight(
            ranks, device=torch.device("cuda", 0), timeout_s=1.0, facts=card(device_id="aaaa"), versions={}
        )

    for problem in run_ranks(2, work, errors=True):
        assert isinstance(problem, ConfigError)
        assert "ranks 0, 1 are all on one device (Tesla T4, aaaa, host n1)" in str(problem)
        assert "CUDA_VISIBLE_DEVICES" in str(problem)


def test_cpu_ranks_may_share_a_host() -> None:
    reports = run_ranks(
        2, lambda ranks: preflight(ranks, device=torch.device("cpu"), timeout_s=1.0, all_reduce=lambda: None)
    )
    assert [len(report.facts) for report in reports] == [2, 2]
    assert all(report.all_reduce_s >= 0.0 for report in reports)


def test_different_versions_are_named_together() -> None:
    def work(ranks):
        versions = {"torch": "2.13.0", "deepspeed": f"0.19.{ranks.rank}", "accelerate": f"1.1{ranks.rank}.0"}
        return preflight(ranks, device=torch.device("cpu"), timeout_s=1.0, versions=versions)

    for problem in run_ranks(2, work, errors=True):
        assert isinstance(problem, CompatibilityError)
        for part in ("deepspeed: rank 0 has 0.19.0, rank 1 has 0.19.1", "accelerate", "2 problems"):
            assert part in str(problem)
        assert "torch" not in str(problem)
    assert different_versions([{"torch": "2"}, {}]) == [
        "the ranks run different versions of torch: rank 0 has 2, rank 1 has missing. Install the same one everywhere."
    ]
    assert set(installed_versions()) == set(preflight_module.CHECKED_PACKAGES)


@pytest.mark.scenario(42)
def test_an_all_reduce_that_hangs_becomes_a_message() -> None:
    never = threading.Event()

    def work(ranks):
        return preflight(
            ranks,
            device=torch.device("cpu"),
            timeout_s=0.2,
            facts=card(host=f"n{ranks.rank}", device="Tesla T4"),
            versions={},
            all_reduce=lambda: never.wait(60) and None,
        )

    problems = run_ranks(2, work, errors=True)
    never.set()
    for rank, problem in enumerate(problems):
        assert isinstance(problem, RankError)
        for part in (f"rank {rank} of 2", "did not finish", "host n0", "host n1", "Tesla T4", "NCCL_SOCKET_IFNAME"):
            assert part in str(problem)


@pytest.mark.scenario(42)
def test_an_all_reduce_that_fails_becomes_a_message() -> None:
    def fail() -> None:
        raise RuntimeError("ncclSystemError")

    def work(ranks):
        return preflight(ranks, device=torch.device("cpu"), timeout_s=5.0, facts=card(), versions={}, all_reduce=fail)

    for problem in run_ranks(2, work, errors=True):
        assert isinstance(problem, RankError)
        assert "failed (ncclSystemError)" in str(problem)


def test_one_rank_alone_has_nothing_to_reduce() -> None:
    report = preflight(SingleRank(), device=torch.device("cpu"), timeout_s=1.0)
    assert report.all_reduce_s == 0.0


@pytest.mark.scenario(43)
def test_all_ranks_agree_on_fp16_or_all_stop() -> None:
    mixed = [card("NVIDIA A100", capability=(8, 0)), card("Tesla V100", capability=(7, 0))]
    assert agree_on_dtype(mixed, torch.bfloat16, allow_fp16=True) is torch.float16
    with pytest.raises(CompatibilityError, match=r"rank 1 \(Tesla V100, compute capability 7\.0\)") as caught:
        agree_on_dtype(mixed, torch.bfloat16, allow_fp16=False)
    assert "allow_fp16" in str(caught.value)
    assert agree_on_dtype(mixed, torch.float32, allow_fp16=False) is torch.float32
    assert agree_on_dtype(mixed[:1], torch.bfloat16, allow_fp16=False) is torch.bfloat16
    assert agree_on_dtype([card(capability=None)], torch.bfloat16, allow_fp16=False) is torch.bfloat16
