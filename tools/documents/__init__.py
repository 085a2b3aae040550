"""Generates tables and plots of the documents from the code and from measurements."""
