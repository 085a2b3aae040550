"""Names of experts in state dicts, and conversion between them, without I/O or communication."""
