"""What a run has left behind as a page of pictures, and several runs beside each other."""
