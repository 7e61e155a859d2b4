"""``portakern report``: tables of PORTING.md, RESULTS.md and README.md, and plots under docs/plots/, made from a
checkout's results and from its source.
"""
