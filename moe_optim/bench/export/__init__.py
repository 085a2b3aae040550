"""What ``moe-optim bench export`` measures: weights on their way from training to an engine."""
