"""Quantize tensors: codes and scales as the format's own library writes them."""
