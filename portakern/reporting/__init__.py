"""``portakern report``: the tables of PORTING.md and README.md and the plots under docs/plots/, made from the files of results of a checkout and from its source."""
