"""Figures, drawn from saved records alone."""
