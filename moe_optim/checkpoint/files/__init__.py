"""Files of a checkpoint: regular, inside it, whole."""
