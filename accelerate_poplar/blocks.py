"""Time a model that does not fit on one device: one of each distinct block, multiplied.

A deep model is a list of like blocks with something before and after. With only the first block of each kind in
place it takes t_1; with one more block of kind g it takes t_g. The whole model, with n_g blocks of kind g, takes
t_1 + sum over g of (n_g - 1) (t_g - t_1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .model_state import full_shape


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A shortened form of a model."""

    keep: Mapping[nn.ModuleList, tuple[int, ...]]
    """Positions that stay in each list of blocks."""
    weight: int
    """How often this variant's extra time counts: n_g - 1; 0 for the first variant, which has no extra block."""


def variants(model: nn.Module) -> tuple[Variant, ...]:
    """The shortened forms to time, the shortest first; empty when the model has no repeated blocks."""
    groups = {blocks: _kinds(blocks) for blocks in _block_lists(model)}
    groups = {blocks: kinds for blocks, kinds in groups.items() if any(len(members) > 2 for members in kinds)}
    if not groups:
        return ()
    shortest = {blocks: tuple(sorted(members[0] for members in kinds)) for blocks, kinds in groups.items()}
    found = [Variant(keep=shortest, weight=0)]
    for blocks, kinds in groups.items():
        for members in kinds:
            if len(members) > 1:
                longer = tuple(sorted((*shortest[blocks], members[1])))
                found.append(Variant(keep={**shortest, blocks: longer}, weight=len(members) - 1))
    return tuple(found)


def combine(seconds: Sequence[float], forms: Sequence[Variant]) -> float:
    """Seconds of the whole model from those of its variants, in the same order.

    A longer variant that seems faster than the shortest counts as equal: that is noise.
    """
    shortest = seconds[0]
    extra = (form.weight * max(0.0, time - shortest) for time, form in zip(seconds[1:], forms[1:], strict=True))
    return shortest + sum(extra)


@contextlib.contextmanager
def shortened(variant: Variant) -> Iterator[None]:
    """Leave only the variant's blocks in place."""
    saved = [(blocks, dict(blocks._modules)) for blocks in variant.keep]
    try:
        for blocks, content in saved:
            kept = [content[str(position)] for position in variant.keep[blocks]]
            blocks._modules.clear()
            blocks._modules.update({str(number): block for number, block in enumerate(kept)})
        yield
    finally:
        for blocks, content in saved:
            blocks._modules.clear()
            blocks._modules.update(content)


def _block_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Outermost lists of modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 2:
            yield child
        else:
            yield from _block_lists(child)


def _kinds(blocks: nn.ModuleList) -> list[tuple[int, ...]]:
    """Positions of blocks that have the same modules and parameter shapes."""
    kinds: dict[object, list[int]] = {}
    for position, block in enumerate(blocks):
        modules = tuple((name, type(module)) for name, module in block.named_modules())
        parameters = tuple((name, full_shape(p), p.requires_grad) for name, p in block.named_parameters())
        kinds.setdefault((modules, parameters), []).append(position)
    return [tuple(members) for members in kinds.values()]
