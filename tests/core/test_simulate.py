"""Clusters that need not exist: files, memory, links, curves, strategies side by side, uneven state."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from accelerate_poplar.cephalo import simulate_cephalo
from accelerate_poplar.cluster import Cluster, cluster_from_dict, load_cluster
from accelerate_poplar.devices import DEVICES, find_device
from accelerate_poplar.errors import ConfigError, InsufficientMemoryError, PlanError, ProfileError
from accelerate_poplar.latencies import LatencyTable
from accelerate_poplar.model_shape import MODELS, find_model, shape_from_config
from accelerate_poplar.profiles import ClusterProfile
from accelerate_poplar.search import STRATEGIES, find_plan
from accelerate_poplar.simulate import (
    Workload,
    break_down_plan,
    compare,
    evaluate,
    simulated_profile,
    state_bytes,
    step_time,
)
from tests.core.planner_cases import Case
from tests.data_folder import data_folder

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "configs" / "clusters").glob("*.yaml"))
LLAMA = find_model("llama-1.1b")


def cluster(*hosts: tuple[str, int], **settings: float) -> Cluster:
    """`cluster(("T4", 2), ("L4", 1))`: hosts with links of 10 and a network of 5 gigabytes per second."""
    described = [{"device": device, "count": count, "link_gbytes_per_s": 10} for device, count in hosts]
    return cluster_from_dict({"hosts": described, "inter_host_gbytes_per_s": 5, **settings})


# The step-time model, by hand


def test_step_time_where_ranks_do_not_wait() -> None:
    case = Case(
        times=((1.0, 2.0), (2.0, 3.0)),
        caps=(2, 2),
        global_batch_size=6,
        zero_stage=1,
        overheads=(0.5, 0.25),
        per_micro_step_s=99.0,
        per_step_s=0.125,
    )
    plan = find_plan(case.profile(), global_batch_size=6, zero_stage=1)
    assert [r.micro_batch_sizes for r in plan.ranks] == [(2, 2), (2,)]
    parts = break_down_plan(case.profile(), plan)
    assert parts.step_time_s == 4.0 + 0.5 + 0.125
    assert parts.compute_time_s == (4.0, 3.0)
    assert (parts.micro_step_time_s, parts.overhead_s, parts.exposed_communication_s) == ((), 0.5, 0.125)


def test_step_time_where_ranks_wait_in_every_micro_step() -> None:
    case = Case(
        times=((1.0, 2.0), (2.0, 3.0)),
        caps=(2, 2),
        global_batch_size=5,
        zero_stage=2,
        overheads=(0.5, 0.25),
        per_micro_step_s=2.0,
        per_step_s=0.125,
        overlap=0.5,
    )
    plan = find_plan(case.profile(), global_batch_size=5, zero_stage=2)
    assert [r.micro_batch_sizes for r in plan.ranks] == [(2, 1), (2, 0)]
    parts = break_down_plan(case.profile(), plan)
    # 3 s hide 1.5 of the 2 s of communication, 1 s hides 0.5 s.
    assert parts.step_time_s == pytest.approx((3.0 + 0.5) + (1.0 + 1.5) + 0.5 + 0.125)
    assert parts.micro_step_time_s == (3.0, 1.0)
    assert parts.compute_time_s == (3.0, 3.0)
    assert parts.exposed_communication_s == pytest.approx(2.0 + 0.125)
    assert step_time(case.profile(), plan) == parts.step_time_s


# Links, state and memory


def test_a_ring_moves_its_share_over_the_slowest_link_in_it() -> None:
    one_host = cluster(("T4", 4), latency_us=0)
    assert one_host.ring_time_s(10e9) == pytest.approx(0.75)
    two_hosts = cluster(("T4", 2), ("L4", 2), latency_us=0)
    assert two_hosts.ring_time_s(10e9) == pytest.approx(1.5)
    assert cluster(("T4", 1)).ring_time_s(10e9) == 0.0
    alone = cluster(("T4", 1), ("L4", 1), latency_us=0)
    # Cards that are alone on their host do not use its links.
    assert replace(alone, inter_host_gbytes_per_s=20.0).ring_time_s(10e9) == pytest.approx(0.25)
    hops = cluster(("T4", 4), latency_us=100)
    assert hops.ring_time_s(0.0, pieces=10) == pytest.approx(10 * 3 * 100e-6)


def test_training_state_by_stage_is_what_the_zero_paper_says() -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 ranks, in units of 10^9 bytes.
    assert [round(state_bytes(7_500_000_000, stage, 64) / 1e9, 1) for stage in range(4)] == [120.0, 31.4, 16.6, 1.9]
    assert [state_bytes(1, stage, 2, value_bytes=4) for stage in range(4)] == [16.0, 12.0, 10.0, 8.0]


@pytest.mark.parametrize(("name", "billions"), [("llama-1.1b", 1.10), ("llama-7b", 6.74), ("bert-large", 0.335)])
def test_parameters_are_counted_as_published(name: str, billions: float) -> None:
    assert find_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_higher_stages_and_more_ranks_leave_room_for_larger_micro_batches() -> None:
    few, many = cluster(("V100S-PCIe-32GB", 2)), cluster(("V100S-PCIe-32GB", 8))
    caps = [caps_of(few, stage)[0] for stage in range(4)]
    assert caps == sorted(caps)
    assert caps[0] < caps[3]
    assert caps_of(many, 3)[0] > caps_of(few, 3)[0]
    assert caps_of(few, 3, checkpointing=True)[0] > caps_of(few, 3)[0]


def caps_of(where: Cluster, stage: int, *, checkpointing: bool = False) -> tuple[int, ...]:
    work = Workload(model=LLAMA, checkpointing=checkpointing)
    return simulated_profile(where, work, zero_stage=stage).stage(stage).max_micro_batch_size


def test_each_stage_communicates_where_it_should() -> None:
    where, work = cluster(("A100-40GB", 4), latency_us=0), Workload(model=LLAMA)
    once = where.ring_time_s(2.0 * LLAMA.num_parameters)
    found = {}
    for stage in range(4):
        profile = simulated_profile(where, work, zero_stage=stage).stage(stage)
        found[stage] = (profile.per_micro_step_s / once, profile.per_step_s / once)
    assert found == {0: (0.0, 2.0), 1: (0.0, 2.0), 2: (1.0, 1.0), 3: (3.0, 0.0)}


def test_the_optimizer_updates_a_share_from_stage_one_on() -> None:
    where, work = cluster(("A100-40GB", 4)), Workload(model=LLAMA)
    first, second = (simulated_profile(where, work, zero_stage=s).ranks[0].step_overhead_s for s in (0, 1))
    assert first == pytest.approx(4 * second)
    assert first == pytest.approx(28 * LLAMA.num_parameters / 1555e9)


def test_simulated_profiles_say_so_and_survive_their_file(tmp_path: Path) -> None:
    profile = simulated_profile(cluster(("T4", 2), ("L4", 1)), Workload(model=LLAMA), zero_stage=3)
    assert profile.emulated
    assert "simulated" in profile.model
    assert [rank.device for rank in profile.ranks] == ["T4", "T4", "L4"]
    profile.save(tmp_path / "profiles.json")
    assert ClusterProfile.load(tmp_path / "profiles.json") == profile


# Strategies side by side


def test_shipped_clusters_run_every_paper_workload_at_every_stage() -> None:
    assert [path.stem for path in SHIPPED] == ["a", "b", "c"]
    for path, name, stage in itertools.product(SHIPPED, ("llama-0.5b", "llama-1.1b", "bert-large"), range(4)):
        work = Workload(model=find_model(name))
        profile = simulated_profile(load_cluster(path), work, zero_stage=stage)
        results = compare(
            profile,
            global_batch_size=2**21 // work.model.seq_len,
            zero_stage=stage,
            token_flops=work.token_flops,
        )
        assert [result.strategy for result in results] == list(STRATEGIES)
        best = results[0]
        if best.plan is None:
            # 1.1B parameters with all their state exceed 16 GiB.
            assert (path.stem, name, stage) == ("b", "llama-1.1b", 0)
            assert "not a single sample fits" in best.problem
            continue
        assert all(best.samples_per_s >= other.samples_per_s * (1 - 1e-9) for other in results)
        assert best.mfu is not None
        assert 0.1 < best.mfu < 0.7
        assert 0.0 <= best.idle_fraction < 1.0
        assert best.tokens_per_s == pytest.approx(best.samples_per_s * work.model.seq_len)


def test_unequal_speed_gains_and_equal_speed_at_low_stages_hardly_does() -> None:
    work = Workload(model=LLAMA)
    gains = {}
    for path in SHIPPED:
        results = compare(
            simulated_profile(load_cluster(path), work, zero_stage=1), global_batch_size=1024, zero_stage=1
        )
        speeds = {result.strategy: result.samples_per_s for result in results}
        gains[path.stem] = speeds["optimal"] / speeds["even"]
    assert gains["a"] < 1.1
    assert 1.3 < gains["c"] < gains["b"] < 3.92


def test_a_strategy_without_a_plan_says_why_and_a_wrong_request_is_an_error() -> None:
    case = Case(times=((1.0,), (1.0,)), caps=(1, 0), global_batch_size=4, peaks=(1e12, 0.0))
    results = {r.strategy: r for r in compare(case.profile(), global_batch_size=4, zero_stage=0)}
    assert "rank 1" in results["even"].problem
    assert "peak_flops" in results["flops"].problem
    assert results["optimal"].plan is not None
    assert results["optimal"].mfu is None
    with pytest.raises(PlanError, match="global_batch_size is 0"):
        compare(case.profile(), global_batch_size=0, zero_stage=0)


def test_a_plan_of_ones_own_is_judged_by_the_same_model() -> None:
    case = Case(times=((1.0, 2.0), (1.0, 2.0)), caps=(2, 2), global_batch_size=4)
    plan = replace(find_plan(case.profile(), global_batch_size=4, zero_stage=0), strategy="manual")
    result = evaluate(case.profile(), plan)
    assert (result.strategy, result.samples_per_s, result.tokens_per_s) == ("manual", 2.0, 32.0)
    assert result.idle_fractions == (0.0, 0.0)


def test_better_hardware_never_makes_the_simulated_step_slower() -> None:
    work = Workload(model=LLAMA)

    def seconds(where: Cluster, stage: int) -> float:
        profile = simulated_profile(where, work, zero_stage=stage)
        return find_plan(profile, global_batch_size=300, zero_stage=stage).predicted_step_time_s

    for stage in (1, 2, 3):
        base = cluster(("V100S-PCIe-32GB", 2), ("T4", 2))
        assert seconds(cluster(("V100S-PCIe-32GB", 2), ("A10G", 2)), stage) <= seconds(base, stage)
        assert seconds(replace(base, inter_host_gbytes_per_s=20.0), stage) <= seconds(base, stage)
        assert seconds(replace(base, overlap=1.0), stage) <= seconds(base, stage)
        assert seconds(replace(base, memory_fraction=0.95), stage) <= seconds(base, stage)


# Uneven training state


def test_uneven_state_makes_room_where_even_state_does_not_fit() -> None:
    where = cluster(("A100-40GB", 1), ("T4", 3))
    work = Workload(model=find_model("llama-7b", seq_len=512), checkpointing=True)
    small = replace(where, placement=(0, 1))
    with pytest.raises(InsufficientMemoryError, match="of training state and one sample"):
        simulate_cephalo(small, work, global_batch_size=16)
    roomy = cluster(("A100-80GB", 2), ("T4", 2))
    result = simulate_cephalo(roomy, work, global_batch_size=64)
    assert result.even_state_step_time_s == float("inf")
    assert np.isfinite(result.step_time_s)
    assert sum(result.state_fraction) == pytest.approx(1.0)
    assert min(result.state_fraction[:2]) > max(result.state_fraction[2:])


def test_uneven_state_costs_a_quarter_more_where_memory_is_not_the_limit() -> None:
    # Communication dominates and one micro-step holds the batch, with even and uneven state alike.
    where = cluster(("A100-80GB", 2), ("A100-80GB", 2), latency_us=0)
    where = replace(where, inter_host_gbytes_per_s=0.001)
    result = simulate_cephalo(where, Workload(model=LLAMA), global_batch_size=8)
    assert result.gain == pytest.approx(1.0 / 1.25, rel=1e-3)


def test_uneven_state_respects_the_memory_of_every_rank_and_of_all_together() -> None:
    where, work = cluster(("V100-PCIe-16GB", 2), ("T4", 2)), Workload(model=LLAMA)
    result = simulate_cephalo(where, work, global_batch_size=1024)
    per_sample = LLAMA.activation_bytes()
    usable = (16 * 0.9 - 2.0) * 2**30 - 4 * LLAMA.layer_parameters
    assert all(cap * per_sample <= usable for cap in result.max_micro_batch_size)
    whole = state_bytes(LLAMA.num_parameters, 3, 1)
    assert sum(result.max_micro_batch_size) * per_sample + whole <= 4 * usable
    assert (1 + sum(result.max_micro_batch_size)) * per_sample + whole > 4 * usable


# The device table


def test_every_device_has_figures_and_a_source() -> None:
    assert len({device.table_name for device in DEVICES.values() if device.table_name}) >= 12
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.source
        assert 0.0 < device.efficiency <= 0.95
        assert find_device(name.lower()) is device
    assert find_device("a100x40").name == "A100-40GB"


def test_an_unknown_device_lists_the_known_and_says_how_to_describe_one() -> None:
    with pytest.raises(ConfigError, match=r"device 'B100' is unknown. Known: H100-NVL-94GB, .*`devices:`"):
        find_device("B100")


def test_fitted_efficiencies_are_as_close_to_measurements_as_they_claim() -> None:
    folder = data_folder()
    if folder is None:
        pytest.skip("no data folder to compare the fits with")
    table = LatencyTable.load(folder / "gpu_latencies.json")
    errors: dict[str, list[float]] = {}
    for curve in table.curves:
        if curve.dtype != "float16" or (curve.model, curve.gpu) == ("llamav2_7b", "l4"):
            continue  # That curve is twice as slow as the same layer in llama_7b: another run of the device.
        shape, device = table.shape(curve.model, seq_len=curve.seq_len), find_device(curve.gpu)
        for size, seconds in enumerate(curve.layer_time_s, start=1):
            predicted = device.layer_time_s(
                parameters=shape.layer_parameters,
                hidden_size=shape.hidden_size,
                seq_len=curve.seq_len,
                micro_batch_size=size,
            )
            errors.setdefault(curve.gpu, []).append(predicted / seconds - 1.0)
    fitted = {device.table_name: device.fit_error for device in DEVICES.values() if device.table_name}
    assert {gpu for gpu, error in fitted.items() if error is not None} == set(errors)
    for gpu, found in errors.items():
        claimed = fitted[gpu]
        assert claimed is not None
        assert float(np.sqrt(np.mean(np.square(found)))) <= claimed + 0.005, gpu


# Measured curves


def table_file(folder: Path) -> Path:
    """A latency table of a model `m` on two devices."""
    text = """{"models": {"m": {"hidden_size": 8, "num_layers": 4, "parameters_per_layer": 1000,
        "total_parameters": 5000}},
      "curves": [
        {"model": "m", "gpu": "t4", "seq_len": 16, "dtype": "float32", "forward_ms": [1.0, 2.0, 3.5],
         "backward_ms": [2.0, 4.0, 7.0]},
        {"model": "m", "gpu": "l4", "seq_len": 16, "dtype": "float32", "forward_ms": [0.5, 0.9],
         "backward_ms": [1.0, 1.8]}]}"""
    path = folder / "table.json"
    path.write_text(text)
    return path


def test_curves_from_a_table_are_its_times_times_the_layers(tmp_path: Path) -> None:
    table = LatencyTable.load(table_file(tmp_path))
    work = Workload(model=table.shape("m", seq_len=16), dtype="fp32", table=table)
    profile = simulated_profile(cluster(("T4", 1), ("L4", 1)), work, zero_stage=0)
    assert [p.step_time_s for p in profile.ranks[0].points] == pytest.approx([0.012, 0.024, 0.042])
    # Where the table ends, so does what is known to fit.
    assert profile.stage(0).max_micro_batch_size == (3, 2)
    with pytest.raises(ProfileError, match=r"no float32 times of m with 16 tokens on A10G; it has l4, t4"):
        simulated_profile(cluster(("A10G", 1)), work, zero_stage=0)
    with pytest.raises(ProfileError, match=r"model 'n' has no entry in `models`. Known: m"):
        table.shape("n", seq_len=16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "an object with a list `curves`"),
        ('{"curves": [1]}', r"curves\[0\]: must be an object"),
        ('{"curves": [{"model": "m"}]}', r"curves\[0\]: `gpu`, `seq_len`.* missing"),
        (
            '{"curves": [{"model": "m", "gpu": "t4", "seq_len": 1, "dtype": "float16", "forward_ms": [1],'
            ' "backward_ms": [-1]}]}',
            r"curves\[0\]: `forward_ms` and `backward_ms` must be lists",
        ),
        ("{", "cannot be read as JSON"),
    ],
)
def test_broken_tables_name_the_curve(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        LatencyTable.load(path)


def synthetic_profiles(kinds: tuple[str, ...], stage: int, bandwidth: float) -> ClusterProfile:
    """Two ranks of each kind from the device table."""
    where = replace(cluster(*((kind, 2) for kind in kinds)), inter_host_gbytes_per_s=bandwidth)
    return simulated_profile(where, Workload(model=find_model("llama-1.1b", seq_len=512)), zero_stage=stage)


@pytest.mark.parametrize("stage", range(4))
def test_no_rival_is_faster_on_mixes_of_the_device_table(stage: int) -> None:
    for kinds in itertools.combinations(("A100-80GB", "V100-PCIe-16GB", "T4", "L4"), 2):
        for bandwidth, batch in ((0.5, 64), (20.0, 1023)):
            never_slower_than_rivals(synthetic_profiles(kinds, stage, bandwidth), batch, stage)


@pytest.mark.parametrize("stage", range(4))
def test_no_rival_is_faster_on_mixes_of_measured_gpus(stage: int) -> None:
    folder = data_folder()
    if folder is None:
        pytest.skip("no data folder; the mixes of the device table above are checked instead")
    table = LatencyTable.load(folder / "gpu_latencies.json")
    work = Workload(model=table.shape("llama_tiny", seq_len=512), table=table)
    for kinds in itertools.combinations(("a100x40", "a6000", "t4", "p100"), 2):
        for bandwidth, batch in ((0.5, 64), (20.0, 1023)):
            where = replace(cluster(*((kind, 2) for kind in kinds)), inter_host_gbytes_per_s=bandwidth)
            never_slower_than_rivals(simulated_profile(where, work, zero_stage=stage), batch, stage)


def never_slower_than_rivals(profile: ClusterProfile, batch: int, stage: int) -> None:
    best, *rivals = compare(profile, global_batch_size=batch, zero_stage=stage)
    if best.plan is None:
        return
    assert best.breakdown is not None
    for rival in rivals:
        if rival.breakdown is not None:
            assert best.breakdown.step_time_s <= rival.breakdown.step_time_s * (1 + 1e-9), rival.strategy


# Files that are wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hosts": []}, "`hosts` must be a list with at least one host"),
        ({"hosts": [3]}, r"hosts\[0\]: must be a mapping"),
        ({"hosts": [{"device": "T4", "count": 0, "link_gbytes_per_s": 1}]}, r"hosts\[0\]: `count` is 0"),
        ({"hosts": [{"device": "T4", "count": 2}]}, r"hosts\[0\]: `link_gbytes_per_s` is None"),
        ({"hosts": [{"device": "T9", "count": 1}]}, r"hosts\[0\]: device 'T9' is unknown"),
        ({"hosts": [{"device": "T4", "cout": 1}]}, r"hosts\[0\]: the key `cout` is unknown"),
        ({"overlap": 1.5}, "`overlap` is 1.5; it must be a number at least 0, at most 1"),
        ({"memory_fraction": 0}, "`memory_fraction` is 0; it must be a number above 0, at most 1"),
        ({"latency_us": "fast"}, "`latency_us` is 'fast'"),
        ({"inter_host_gbytes_per_s": float("nan")}, "`inter_host_gbytes_per_s` is nan"),
        ({"hostss": []}, "the key `hostss` is unknown"),
        (
            {"devices": {"X": {"peak_tflops": 10, "memory_gib": 8}}},
            r"devices\['X'\]: `bandwidth_gbytes_per_s` is None",
        ),
        ({"devices": {"X": 3}}, r"devices\['X'\]: must be a mapping"),
        ({"devices": []}, "`devices` maps names"),
    ],
)
def test_wrong_cluster_files_are_explained(tmp_path: Path, change: dict[str, object], message: str) -> None:
    good = {
        "hosts": [
            {"device": "T4", "count": 2, "link_gbytes_per_s": 5},
            {"device": "L4", "count": 1},
        ],
        "inter_host_gbytes_per_s": 2,
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({**good, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


def test_all_mistakes_of_a_cluster_file_come_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*`colour` is unknown.*`count` is -1.*`overlap` is 2"):
        cluster_from_dict({"colour": 1, "overlap": 2, "hosts": [{"device": "T4", "count": -1}]})


def test_cluster_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_cluster(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_cluster(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="holds a mapping with `hosts`, not list"):
        load_cluster(tmp_path / "list.yaml")


def test_a_device_of_ones_own() -> None:
    described = cluster_from_dict(
        {
            "devices": {"X": {"peak_tflops": 10, "memory_gib": 8, "bandwidth_gbytes_per_s": 200, "efficiency": 0.5}},
            "hosts": [{"device": "X", "count": 1}],
        }
    )
    device = described.hosts[0].device
    assert (device.peak_tflops, device.efficiency, device.fit_error) == (10.0, 0.5, None)
    assert described.world_size == 1


def test_models_by_name_by_file_and_not_at_all(tmp_path: Path) -> None:
    assert set(MODELS) >= {"llama-0.5b", "llama-1.1b", "bert-base", "bert-large"}
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "tiny", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10,'
        ' "intermediate_size": 16, "hidden_act": "gelu", "tie_word_embeddings": true}'
    )
    shape = find_model(path, seq_len=7)
    assert (shape.name, shape.seq_len, shape.layer_parameters) == ("tiny", 7, 4 * 64 + 2 * 8 * 16 + 16)
    assert shape.num_parameters == 2 * shape.layer_parameters + 10 * 8 + 8
    with pytest.raises(ConfigError, match=r"model 'gpt-9' is neither a file nor one of llama-0.5b"):
        find_model("gpt-9")
    with pytest.raises(ConfigError, match="seq_len is 0"):
        find_model("bert-base", seq_len=0)
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*`num_hidden_layers` is None.*`vocab_size` is -1"):
        shape_from_config({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": -1})
    with pytest.raises(ConfigError, match="a model config is an object, not list"):
        shape_from_config([])
