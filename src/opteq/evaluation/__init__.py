"""Scores of a trained network on a test set, and the report drawn from them."""
