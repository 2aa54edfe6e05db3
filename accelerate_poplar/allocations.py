"""Counts the bytes of live tensors, on real devices and under fake tensors alike.

One counter serves three purposes: predicting a peak (under `FakeTensorMode`), measuring it where the device has no
counter of its own (CPU), and refusing to go beyond a limit (emulated memory).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROUNDING = {"cuda": 512, "cpu": 64}
"""Allocators hand out multiples of this many bytes (CUDA's caching allocator; posix_memalign on the host)."""


class AllocationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live and peak tensor bytes while active, each storage once.

    Storages made while it is active stay counted until they are freed, also when that happens after it has been
    left; it can be entered any number of times. Kernels' own scratch space is not seen. A compiled model runs
    uncompiled while it is active: torch.compile would otherwise give up on the model for good.

    Args:
        device_type: Only tensors on this kind of device count, for example `cuda`.
        base_bytes: Bytes that count as in use throughout, for example training state made before.
        limit_bytes: Going above raises `torch.OutOfMemoryError`; None = no limit.
        describe: Text for that error, given the bytes that would have been in use.
    """

    def __init__(
        self,
        *,
        device_type: str = "cpu",
        base_bytes: int = 0,
        limit_bytes: int | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.base_bytes = base_bytes
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._describe = describe
        self._rounding = _ROUNDING.get(device_type, 1)
        self._stances: list[Any] = []
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __enter__(self) -> AllocationCounter:
        """Start counting."""
        self._stances.append(torch.compiler.set_stance("force_eager"))  # type: ignore[no-untyped-call]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop counting; what is live stays counted until it is freed."""
        super().__exit__(*exception)
        self._stances.pop().__exit__(*exception)

    def know(self, tensors: Iterable[torch.Tensor], *, count: bool) -> None:
        """Register tensors made elsewhere.

        Args:
            tensors: For example parameters; views of a known storage cost nothing.
            count: Whether their bytes are added to `live_bytes`; False when `base_bytes` holds them already.
        """
        for tensor in tensors:
            self._add(tensor, count=count)

    def reset_peak(self) -> None:
        """Let the peak start from what is live now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, then count the storages it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        new = [t for t in tensors_in(result) if t.device.type == self.device_type and not self._is_known(t)]
        if new:
            borrowed = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
            for tensor in new:
                self._add(tensor, count=tensor.untyped_storage()._cdata not in borrowed)
            self._check()
        return result

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def _add(self, tensor: torch.Tensor, *, count: bool) -> None:
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = -(-storage.nbytes() // self._rounding) * self._rounding if count else 0

        def freed(_: weakref.ref[Any]) -> None:
            self._storages.pop(key, None)
            self.live_bytes -= size

        self._storages[key] = (weakref.ref(storage, freed), size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _check(self) -> None:
        in_use = self.base_bytes + self.live_bytes
        if self.limit_bytes is not None and in_use > self.limit_bytes:
            text = f"{in_use} bytes of tensors would be in use, the limit is {self.limit_bytes} bytes."
            raise torch.OutOfMemoryError(self._describe(in_use) if self._describe else text)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor with a storage of its own in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
