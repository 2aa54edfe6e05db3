"""Draw the pictures of the documentation again: docs/images/*.svg.

    python scripts/draw_docs.py [FOLDER]

Everything drawn is simulated: two A100-80GB beside two V100S-32GB training Llama 0.5B.
"""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate_poplar import plots
from accelerate_poplar.cluster import cluster_from_dict
from accelerate_poplar.model_shape import find_model
from accelerate_poplar.search import find_plan
from accelerate_poplar.simulate import Workload, simulated_profile
from accelerate_poplar.step_model import group_ranks

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
CLUSTER = {
    "name": "two kinds",
    "hosts": [
        {"name": "big", "device": "A100-80GB", "count": 2, "link_gbytes_per_s": 20},
        {"name": "small", "device": "V100S-PCIe-32GB", "count": 2, "link_gbytes_per_s": 10},
    ],
    "inter_host_gbytes_per_s": 5,
}
ON_PAPER = {"ink": "#1b1e23", "muted": "#626a75", "paper": "#ffffff", "line": "#2563a8", "mark": "#b04a0a"}
"""Colours outside the report's page, which brings its own."""


def main() -> int:
    """Draw all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    work = Workload(model=find_model("llama-0.5b", seq_len=1024))
    for stage in (1, 2):
        profile = simulated_profile(cluster_from_dict(CLUSTER), work, zero_stage=stage)
        plans = {
            f"{title} (simulated)": find_plan(profile, global_batch_size=96, zero_stage=stage, strategy=strategy)
            for title, strategy in (("even split", "even"), ("optimal", "optimal"))
        }
        save(plots.timeline_svg(profile, plans, name=f"step{stage}"), folder / f"step_zero{stage}.svg")
    kinds = group_ranks(profile, profile.stage(2).max_micro_batch_size)
    for number, kind in enumerate(sorted(kinds, key=lambda kind: kind.ranks)):
        chosen = sorted(set(plans["optimal (simulated)"].ranks[kind.ranks[0]].micro_batch_sizes))
        picture = plots.curve_svg(profile, kind, chosen, name=f"curve{number}")
        save(picture, folder / f"curve_{'fast' if number == 0 else 'slow'}_rank.svg")
    return 0


def save(picture: str, path: Path) -> None:
    """Write a picture that stands alone, on paper whatever the viewer's background."""
    for name, colour in ON_PAPER.items():
        picture = picture.replace(f"var(--{name})", colour)
    head, rest = picture.split(">", 1)
    background = f'<rect width="100%" height="100%" fill="{ON_PAPER["paper"]}"/>'
    path.write_text(f"{head}>{background}{rest}", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
