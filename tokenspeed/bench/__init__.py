"""Measurements of TokenSpeed as its users meet it."""
