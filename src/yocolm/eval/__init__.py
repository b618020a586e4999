"""Evaluation of a model on text."""
