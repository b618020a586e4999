"""Jinja programs that come with models, in a sandbox with bounds."""
