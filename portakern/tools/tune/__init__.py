"""Finding tilings: which are legal (``space``), in which order they are tried (``search``), whether one is right and
how good it is (``judges``, ``static``), what is kept (``journal``, ``store``), and for which calls the loss of the
shipped choice is asked (``drawn``). ``tuner`` takes calls that share a key, ``run`` all of them.
"""
