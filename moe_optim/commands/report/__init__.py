"""HTML reports of one run and of several."""
