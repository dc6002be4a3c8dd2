"""Weights from a folder, a GGUF file or nowhere (dummy) into a plain module."""

from tokenspeed.loader.empty import empty_model
from tokenspeed.loader.layout import block_layout
from tokenspeed.loader.load import LoadReport, load_weights

__all__ = ["LoadReport", "block_layout", "empty_model", "load_weights"]
