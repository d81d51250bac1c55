"""Figures and pages from finished runs: curves, the report, attention maps, the W&B workspace."""
