"""Rewrite generated tables and pictures: ``python -m tools.documents``."""

from tools.documents.blocks import main

main()
