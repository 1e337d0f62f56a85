"""Verification: the same training twice, compared by its bits."""
