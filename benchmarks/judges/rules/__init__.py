"""One file a harness: its rule, told by where it is published and done again from that description."""
