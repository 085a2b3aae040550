"""The update of a step: Adam over shards of any kind, and over blocks that are encoded with it."""
