"""Rewrite generated tables and plots: ``python -m tools.documents``."""

from tools.documents.blocks import main

main()
