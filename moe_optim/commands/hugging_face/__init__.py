"""Model families that transformers loads: names, shapes and configurations on both sides."""
