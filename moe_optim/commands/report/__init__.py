"""The report of a run as a page, and the comparison of several runs."""
