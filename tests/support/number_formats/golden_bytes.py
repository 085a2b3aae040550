"""Bytes that other packages made, by ``python -m tools.upstream.golden_bytes``."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

FOLDER = Path(__file__).parent / "golden"


class Golden(NamedTuple):
    """A weight [R, C] bf16, and what each source makes of it: uint8 buffers [R, ...] by name."""

    weight: torch.Tensor
    sources: dict[str, dict[str, torch.Tensor]]


def read_golden(format: str) -> Golden:
    report = json.loads((FOLDER / f"{format}.json").read_text())
    sources = {
        source: {name: _from_hex(rows) for name, rows in buffers.items()}
        for source, buffers in report["sources"].items()
    }
    return Golden(_from_hex(report["weight"]).view(torch.bfloat16), sources)


def _from_hex(rows: list[str]) -> torch.Tensor:
    return torch.from_numpy(np.array([list(bytes.fromhex(row)) for row in rows], dtype=np.uint8))
