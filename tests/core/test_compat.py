"""What is known of other libraries' versions."""

from __future__ import annotations

import pytest

from accelerate_poplar._compat import installed_faults, known_faults


@pytest.mark.scenario(13)
@pytest.mark.parametrize(
    ("version", "faulty"),
    [("0.18.5", False), ("0.18.6", True), ("0.18.10", True), ("0.18.11", False), ("0.19.8", False)],
)
def test_versions_that_lose_a_micro_batch_are_named(version: str, faulty: bool) -> None:
    found = known_faults(version)
    assert bool(found) == faulty
    assert all(version in sentence and "ZeRO stage 1" in sentence for sentence in found)


def test_the_tested_version_has_no_known_fault() -> None:
    assert installed_faults() == []
