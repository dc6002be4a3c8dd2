"""Capture, split, plan, run: from a plain module to the pieces that are executed."""
