"""Model families as plain PyTorch modules; `MODELS` maps an architecture name to its file."""
