"""Files as they lie on a disk or the Hub: configs, headers, GGUF, quantized formats. Nothing here knows an FFN."""
