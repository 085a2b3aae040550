"""What layouts of experts are called; nothing here imports torch."""

LAYOUTS = ("grouped", "indexed", "sequential", "legacy", "hf", "hf_transposed", "hf_per_expert")
"""Names of ``layouts.LAYOUTS``."""
