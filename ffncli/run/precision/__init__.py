"""The error of a layer in formats with few bits: how large it is, which tensor causes it, and why."""
