"""Numbers that several entrances take where nobody names another."""

EXAMPLES = 150
"""Cases of a check of one op: of the faults that tests plant all are found by then, and some only after 100."""
