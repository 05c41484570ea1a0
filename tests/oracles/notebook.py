"""The values that the example notebook prints, to its four digits: token by token, (2, 3) tokens in order.

They were computed outside this project with numpy, in float32 as in the notebook, from the weights and the dropout mask
that reproduce its printout.
"""


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


UP = _rows("""
    -2.2255 -0.1673 1.5966 -1.5649 -0.1716 0.4000 0.1738 -0.5781
    -3.7350 0.6146 4.0118 -2.1933 1.8573 3.0914 3.0974 0.1763
    -5.2446 1.3965 6.4269 -2.8217 3.8862 5.7829 6.0210 0.9307
    -6.7541 2.1784 8.8421 -3.4501 5.9151 8.4744 8.9446 1.6852
    -8.2637 2.9603 11.2573 -4.0785 7.9440 11.1658 11.8682 2.4396
    -9.7732 3.7423 13.6725 -4.7069 9.9728 13.8573 14.7918 3.1940
""")
DROPOUT = _rows("""
    0.0000 0.0000 0.0000 0.0000 0.0000 0.4444 0.0000 0.0000
    0.0000 0.6829 4.4575 0.0000 0.0000 0.0000 0.0000 0.1959
    0.0000 1.5517 7.1411 0.0000 4.3180 6.4254 6.6900 1.0342
    0.0000 2.4205 9.8246 0.0000 6.5723 9.4159 9.9384 1.8724
    0.0000 3.2893 12.5082 0.0000 8.8266 12.4065 13.1869 2.7106
    0.0000 4.1581 0.0000 0.0000 11.0809 15.3970 16.4353 3.5489
""")
DOWN = _rows("""
    -0.1719 0.0875 0.0182 0.1130
    -0.5034 0.4950 -1.1832 0.4113
    -0.4243 0.4544 1.0347 1.3692
    -0.4609 0.3650 1.8865 1.9850
    -0.4975 0.2756 2.7382 2.6008
    0.8554 -2.1799 8.1412 2.1299
""")
ACT = [[v if not v.startswith("-") else "0.0000" for v in row] for row in UP]
X = [[f"{4 * token + unit:.4f}" for unit in range(4)] for token in range(6)]
PRINTED = {"x": X, "up": UP, "act": ACT, "dropout": DROPOUT, "down": DOWN}

NEGATIVES_BEFORE_RELU, NEGATIVES_AFTER_RELU = 15, 0
ZEROS_BEFORE_DROPOUT, ZEROS_AFTER_DROPOUT = 15, 21
DROPPED, LIVE = 6, 33
KEPT_BEFORE, KEPT_AFTER = "0.4000", "0.4444"
OUTPUT_RANGE = ("-2.1799", "8.1412")
