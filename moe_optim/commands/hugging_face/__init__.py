"""Model families of transformers: names, shapes and configurations on both sides."""
