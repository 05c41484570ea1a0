"""Files on disk or on the Hub: configs, headers, GGUF, quantized formats. Nothing here knows what an FFN is."""
