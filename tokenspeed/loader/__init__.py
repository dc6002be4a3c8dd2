"""Weights from a folder, a GGUF file or nowhere (dummy) into a plain module."""
