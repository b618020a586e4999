"""Measuring: single operations, this engine, and this engine beside others."""
