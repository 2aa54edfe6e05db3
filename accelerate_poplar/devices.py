"""What the simulator knows of common devices: published figures and fitted efficiencies.

The time of one transformer layer, forward and backward, in 16-bit precision is modelled as the sum of three terms:

    t(b) = (6 P + 12 H T) T b / (efficiency * peak)       matrix products
         + weight_passes * 2 P / bandwidth                reading and writing weights and their gradients
         + activation_passes * 2 H T b / bandwidth        everything that is bound by memory per token

with P the layer's parameters, H the hidden size, T the tokens per sample and b the samples. `efficiency`,
`weight_passes` and `activation_passes` were fitted (least squares on relative error, efficiency at most 0.95) to the
public per-layer kernel times of the Cephalo project (Guo et al., ICS 2025) for two Llama shapes at 512 to 4096 tokens;
`fit_error` is the root mean square of the relative error. Devices without 16-bit measurements there use the median
of the fitted ones of Ampere and later, and say so: `fit_error` is None.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device."""

    name: str
    """Name used in cluster files."""
    peak_tflops: float
    """Dense 16-bit tensor peak in TFLOP/s (10^12), as published; greater than 0."""
    memory_gib: float
    """Memory in GiB; greater than 0."""
    bandwidth_gbytes_per_s: float
    """Memory bandwidth in 10^9 bytes/s, as published; greater than 0."""
    source: str
    """Where the published figures come from."""
    efficiency: float = 0.86
    """Share of the peak that large matrix products reach, above 0 to 1."""
    weight_passes: float = 15.5
    """Times the layer's weights are moved per micro-step; at least 0."""
    activation_passes: float = 410.0
    """Times a 16-bit value per token and hidden unit is moved per layer and micro-step; at least 0."""
    fit_error: float | None = None
    """Root mean square relative error of the fit; None: not fitted, typical values."""
    table_name: str = ""
    """Name of the device in tables of measured latencies; empty when it has none."""

    def layer_time_s(self, *, parameters: int, hidden_size: int, seq_len: int, micro_batch_size: int) -> float:
        """Seconds of forward and backward of one transformer layer; the formula is the module's.

        Args:
            parameters: Parameters of the layer.
            hidden_size: Hidden size.
            seq_len: Tokens per sample.
            micro_batch_size: Samples.
        """
        tokens = seq_len * micro_batch_size
        flops = (6.0 * parameters + 12.0 * hidden_size * seq_len) * tokens
        moved = self.weight_passes * 2.0 * parameters + self.activation_passes * 2.0 * hidden_size * tokens
        return flops / (self.efficiency * self.peak_tflops * 1e12) + moved / (self.bandwidth_gbytes_per_s * 1e9)


_AMPERE = "NVIDIA A100 datasheet (2021)"
_VOLTA = "NVIDIA V100 and V100S datasheets (2020)"

_TABLE = (
    Device(
        name="H100-NVL-94GB",
        peak_tflops=835,
        memory_gib=94,
        bandwidth_gbytes_per_s=3938,
        source="NVIDIA H100 NVL product brief (2024)",
        efficiency=0.55,
        weight_passes=17.4,
        activation_passes=507,
        fit_error=0.061,
        table_name="h100-nvl",
    ),
    Device(
        name="A100-80GB",
        peak_tflops=312,
        memory_gib=80,
        bandwidth_gbytes_per_s=2039,
        source=_AMPERE,
        efficiency=0.90,
        weight_passes=22.1,
        activation_passes=478,
        fit_error=0.044,
        table_name="a100x80",
    ),
    Device(
        name="A100-40GB",
        peak_tflops=312,
        memory_gib=40,
        bandwidth_gbytes_per_s=1555,
        source=_AMPERE,
        efficiency=0.93,
        weight_passes=15.1,
        activation_passes=464,
        fit_error=0.019,
        table_name="a100x40",
    ),
    Device(
        name="A800-80GB",
        peak_tflops=312,
        memory_gib=80,
        bandwidth_gbytes_per_s=1935,
        source="NVIDIA A800 80GB PCIe datasheet (2022): an A100 with slower links; efficiencies of the A100-80GB",
        efficiency=0.90,
        weight_passes=22.1,
        activation_passes=478,
        fit_error=0.044,
    ),
    Device(
        name="A6000",
        peak_tflops=155,
        memory_gib=48,
        bandwidth_gbytes_per_s=768,
        source="NVIDIA RTX A6000 datasheet (2020)",
        efficiency=0.84,
        weight_passes=13.3,
        activation_passes=355,
        fit_error=0.023,
        table_name="a6000",
    ),
    Device(
        name="L40S",
        peak_tflops=362,
        memory_gib=48,
        bandwidth_gbytes_per_s=864,
        source="NVIDIA L40S datasheet (2023)",
        table_name="l40s",
    ),
    Device(
        name="A10G",
        peak_tflops=70,
        memory_gib=24,
        bandwidth_gbytes_per_s=600,
        source="NVIDIA A10G product brief (2021)",
        efficiency=0.95,
        weight_passes=15.9,
        activation_passes=350,
        fit_error=0.025,
        table_name="a10g",
    ),
    Device(
        name="L4",
        peak_tflops=121,
        memory_gib=24,
        bandwidth_gbytes_per_s=300,
        source="NVIDIA L4 datasheet (2023)",
        efficiency=0.41,
        weight_passes=5.2,
        activation_passes=181,
        fit_error=0.049,
        table_name="l4",
    ),
    Device(
        name="V100-SXM2-16GB",
        peak_tflops=125,
        memory_gib=16,
        bandwidth_gbytes_per_s=900,
        source=_VOLTA,
        efficiency=0.58,
        weight_passes=11.7,
        activation_passes=0,
        fit_error=0.019,
        table_name="v100x16",
    ),
    Device(
        name="V100-PCIe-16GB",
        peak_tflops=112,
        memory_gib=16,
        bandwidth_gbytes_per_s=900,
        source=_VOLTA,
        efficiency=0.91,
        weight_passes=14.5,
        activation_passes=553,
        fit_error=0.046,
        table_name="v100-pciex16",
    ),
    Device(
        name="V100S-PCIe-32GB",
        peak_tflops=130,
        memory_gib=32,
        bandwidth_gbytes_per_s=1134,
        source=_VOLTA + "; efficiencies of the V100-PCIe-16GB",
        efficiency=0.91,
        weight_passes=14.5,
        activation_passes=553,
        fit_error=0.046,
    ),
    Device(
        name="T4",
        peak_tflops=65,
        memory_gib=16,
        bandwidth_gbytes_per_s=320,
        source="NVIDIA T4 datasheet (2018)",
        efficiency=0.53,
        weight_passes=3.2,
        activation_passes=776,
        fit_error=0.098,
        table_name="t4",
    ),
    Device(
        name="P100-16GB",
        peak_tflops=21.2,
        memory_gib=16,
        bandwidth_gbytes_per_s=732,
        source="NVIDIA Tesla P100 datasheet (2016)",
        efficiency=0.44,
        weight_passes=33.0,
        activation_passes=2315,
        fit_error=0.030,
        table_name="p100",
    ),
    Device(
        name="P40",
        peak_tflops=12,
        memory_gib=24,
        bandwidth_gbytes_per_s=346,
        source="NVIDIA Tesla P40 datasheet (2016); fp32 peak, for it has no fast 16-bit arithmetic",
        efficiency=0.86,
        weight_passes=11.8,
        activation_passes=1880,
        fit_error=0.113,
        table_name="p40",
    ),
    Device(
        name="RTX-4090",
        peak_tflops=165,
        memory_gib=24,
        bandwidth_gbytes_per_s=1008,
        source="NVIDIA Ada GPU architecture paper (2022), fp16 with fp32 accumulation",
    ),
    Device(
        name="RTX-3090",
        peak_tflops=71,
        memory_gib=24,
        bandwidth_gbytes_per_s=936,
        source="NVIDIA GA102 architecture paper (2020), fp16 with fp32 accumulation",
    ),
)

DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}
"""All known devices by name."""


def find_device(name: str) -> Device:
    """The device called `name`, or known by that name in tables of measured latencies; case does not matter.

    Raises:
        ConfigError: Lists the known names.
    """
    wanted = name.lower()
    for device in DEVICES.values():
        if wanted in (device.name.lower(), device.table_name):
            return device
    raise ConfigError(
        f"device {name!r} is unknown. Known: {', '.join(DEVICES)}. Describe another one under `devices:` in the "
        "cluster file (peak_tflops, memory_gib, bandwidth_gbytes_per_s)."
    )
