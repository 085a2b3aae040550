"""Training a GPT from a recipe: the run, its ranks and what it leaves behind."""
