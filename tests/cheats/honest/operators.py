"""Python's operators on tensors."""


def mlp(x, gate, up, down):
    hidden = x @ gate.T
    return (hidden * hidden.sigmoid() * (x @ up.T)) @ down.T
