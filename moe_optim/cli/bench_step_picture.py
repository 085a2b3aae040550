"""The parts of a training step of both sides, as bars."""

from pathlib import Path
from typing import Any

PARTS = {
    "forward_backward_ms": "forward and backward",
    "grad_copy_ms": "gradients to masters",
    "inner_step_ms": "Adam",
    "main_to_model_ms": "masters to weights",
    "gather_ms": "gather and what follows",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG: above the whole iteration, below the optimizer alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(8, 4.5), layout="constrained")
    for axis, (title, total, parts) in zip(
        axes,
        (
            ("iteration", "iteration_ms", PARTS),
            ("optimizer", "optimizer_ms", {k: v for k, v in PARTS.items() if k[:3] != "for"}),
        ),
        strict=True,
    ):
        for row, side in enumerate(("plugin", "stock")):
            figures, left = report[side], 0.0
            for number, (key, label) in enumerate(PARTS.items()):
                width = (figures[key] or 0.0) if key in parts else 0.0
                shown = label if side == "stock" else None
                axis.barh(row, width, left=left, color=f"C{number}", label=shown)
                left += width
            rest = max(0.0, (figures[total] or 0.0) - left)
            axis.barh(row, rest, left=left, color="0.8", label="rest" if side == "stock" else None)
        axis.set_yticks([0, 1], ["plug-in", "stock"])
        axis.set_xlabel(f"{title}, ms")
    axes[0].legend(ncols=3, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
