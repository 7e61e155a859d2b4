"""How fast ops are: device time beside the measured roof and beside every peer, and no time without a verdict."""
