"""Meanings of the columns of a plan, for ``--help``."""

LEGEND = {
    "experts": "weights, gradients and optimizer of a rank's experts: parameters of bf16 or two "
    "quantized directions with scales, the gradient buffer, masters and moments",
    "model": "the same of the whole model, of the fullest pipeline stage; without activations",
    "vs bf16, vs stock": "experts minus those of stock Megatron in bf16, or in the same format",
    "fits": "whether the model fits a GPU, and what is left for activations",
    "all-gather": "bytes of a parameter all-gather on each rank, including its own shard",
    "of bf16": "fraction of the bytes that stock bf16 gathers",
    "at GB/s": "time of the all-gather at that bandwidth, without overlap",
    "step": "estimated time of optimizer.step() without all-gather",
}
DETAILS = {
    "weights": "data and scales of every stored direction, and copies that compute makes",
    "grads": "the gradient buffer (main_grad)",
    "optimizer": "main params of 4 bytes, exp_avg and exp_avg_sq, or Muon's momentum; with "
    "--use-precision-aware-optimizer, main params of stock bf16 use 2 bytes",
    "copies": "fp32 copies that a step makes of bf16 gradients",
    "kernels": "launches per step that quantize, compute maxima or derive copies; -: not counted",
    "max/mean": "imbalance of elements owned by ranks",
    "path": "aligned: no block spans two ranks. partial amax: some do, and ranks exchange maxima. "
    "bf16 wire: weights are gathered in bf16. by weight: Megatron quantizes weights one by one",
    "amaxes": "fp32 maxima that ranks reduce before encoding",
    "norm, update": "minimum bytes that a fused step of experts reads and writes, for the gradient "
    "norm and for Adam with quantization; formats with a global amax read masters twice",
}
"""Meanings of further columns of ``--details``."""


def legend() -> str:
    """Return the meaning of every column, for ``--help``."""
    lines = [f"  {name}: {meaning}" for name, meaning in LEGEND.items()]
    further = [f"  {name}: {meaning}" for name, meaning in DETAILS.items()]
    return "\n".join(["Columns:", *lines, "Columns of --details:", *further])
