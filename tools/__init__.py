"""Tools of maintainers: evidence, documents, checks. No part of the wheel."""
