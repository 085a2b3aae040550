"""Measures the parts of a training step by wrapping their functions.

The same wrappers serve Megatron's optimizer and this package's. Parts may nest, such as a gather
started by a forward pass: time counts for the innermost part only, so that parts add up.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any

from benchmarks.timing import Mark

WEIGHTS = ("requantize", "gather", "post_processing")
"""Parts between the inner optimizer's step and weights ready for GEMMs."""

_OF_OPTIMIZER = {  # method -> part
    "allgather_params": "gather",  # of LayerWiseDistributedOptimizer
    "_copy_model_grads_to_main_grads": "grad_copy",
    "_copy_main_params_to_model_params": "requantize",
    "_copy_main_params_to_param_buffer": "requantize",
}


@dataclass(frozen=True, slots=True)
class Recording:
    """Time intervals of the parts."""

    mark: Callable[[], Mark]
    """Returns the current time without synchronizing."""
    changes: list[tuple[Mark, tuple[str, ...]]] = field(default_factory=list)
    """Times at which a part began or ended, with the parts open from then on, outermost first."""

    def own_ms(self) -> dict[str, float]:
        """Return the time of each part without nested parts, in ms."""
        own: dict[str, float] = defaultdict(float)
        for parts, ms in self._spans():
            own[parts[-1]] += ms
        return dict(own)

    def whole_ms(self, part: str) -> float:
        """Return the time of ``part`` including nested parts, in ms."""
        return sum(ms for parts, ms in self._spans() if part in parts)

    def _spans(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for (begin, parts), (end, _) in pairwise(self.changes):
            if parts:
                yield parts, end.ms_since(begin)


class Parts:
    """Tracks the open parts, and records their times on request."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._recording: Recording | None = None

    @property
    def innermost(self) -> str | None:
        """Innermost open part."""
        return self._open[-1] if self._open else None

    @contextmanager
    def recorded(self, mark: Callable[[], Mark]) -> Iterator[Recording]:
        """Record parts within a ``with`` block; otherwise nothing is timed."""
        self._recording = Recording(mark)
        try:
            yield self._recording
        finally:
            self._recording = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Open a part for a ``with`` block."""
        self._open.append(name)
        self._note_change()
        try:
            yield
        finally:
            self._open.pop()
            self._note_change()

    def within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` as a part."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return run

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace an attribute of ``owner`` by a wrapper that opens a part."""
        setattr(owner, attribute, self.within(name, getattr(owner, attribute)))

    def _note_change(self) -> None:
        if self._recording is not None:
            self._recording.changes.append((self._recording.mark(), tuple(self._open)))


class _Work:
    """Collectives in flight, whose wait belongs to the gather."""

    def __init__(self, parts: Parts, work: Any) -> None:
        self.wait = parts.within("gather", work.wait)


def instrument(parts: Parts, model_chunks: Iterable[Any], optimizer: Any) -> None:
    """Wrap all work after the backward pass, of stock or of the plug-in.

    ``model_chunks`` are wrapped by DistributedDataParallel; ``optimizer`` is chained or single.
    """
    parts.wrap(optimizer, "get_grad_norm", "grad_norm")
    if hasattr(optimizer, "find_norms"):  # fused step, which reads gradients in place
        parts.wrap(optimizer, "find_norms", "grad_norm")
    parts.wrap(optimizer, "step", "optimizer")
    for one in _links_of(optimizer):
        for method, name in _OF_OPTIMIZER.items():
            if hasattr(one, method):
                parts.wrap(one, method, name)
        if not hasattr(one, "chained_optimizers") and not one.is_stub_optimizer:
            if getattr(optimizer, "is_fused", False):  # Adam's step is not a separate function
                parts.wrap(one, "update_masters", "inner_step")
            else:
                parts.wrap(one.optimizer, "step", "inner_step")
    groups = [
        group
        for chunk in model_chunks
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    for group in groups:
        _instrument_gather(parts, group)
    managed = [group for group in groups if getattr(group, "managed", False)]
    if managed:
        _instrument_plugin(parts, managed)


def _links_of(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and, where it is a chain, everything that is chained in it."""
    yield optimizer
    for one in getattr(optimizer, "chained_optimizers", ()):
        yield from _links_of(one)


def _instrument_gather(parts: Parts, group: Any) -> None:
    """Attribute the start (without nested parts) and the wait to the collectives."""
    for method in ("start_param_sync", "gather"):  # optimizers call the plug-in's gather() directly
        if hasattr(group, method):
            setattr(group, method, _starting(parts, group, getattr(group, method)))
    # then stock gathers MXFP8 weights in bf16, and quantizes them afterwards
    is_late = group.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
    parts.wrap(group, "_post_param_sync", "requantize" if is_late else "post_processing")


def _starting(parts: Parts, group: Any, start: Callable[..., None]) -> Callable[..., None]:
    """Return ``start``, which may leave a gather in flight, as the part ``gather``."""

    @wraps(start)
    def start_gather(*args: Any, **kwargs: Any) -> None:
        with parts.part("gather"):
            start(*args, **kwargs)
        work = group.param_gather_handle
        if work is not None and not isinstance(work, _Work):
            group.param_gather_handle = _Work(parts, work)

    return start_gather


def _instrument_plugin(parts: Parts, groups: Iterable[Any]) -> None:
    """Separate requantization from the gather that precedes or follows it."""
    from moe_optim.buckets import bucket_group
    from moe_optim.kernels.member_table import MemberTable

    parts.wrap(bucket_group, "fill_slices", "requantize")
    parts.wrap(MemberTable, "launch", "requantize")  # wire bf16: after the whole bucket
    for group in groups:
        for bucket in group.managed:
            parts.wrap(bucket, "open_gather", "requantize")
