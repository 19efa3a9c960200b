"""What the pictures of all chapters share: seven colours, and which kind of memory has which.

Paul Tol's "bright" scheme: its colours can be told apart with every kind of colour vision.
"""
BLUE, CYAN, GREEN, YELLOW, RED, PURPLE, GREY = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377",
                                                "#bbbbbb")

# The kinds of the memory ledger, in its order.
KINDS = {"params": BLUE, "grads": CYAN, "optimizer": GREEN, "activations": RED, "comm": PURPLE, "workspace": GREY,
         "host": YELLOW, "disk": "#000000"}
ON_DEVICE = [kind for kind in KINDS if kind not in ("host", "disk")]
