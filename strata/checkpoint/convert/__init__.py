"""Tensors from and to the files of other programs: safetensors, NumPy and torch."""
