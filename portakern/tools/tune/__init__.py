"""Finding tilings: which are legal (``space``), in which order they are tried (``search``), whether one is right
and how good it is (``benches``, ``static``), what is kept (``journal``, ``store``), and for which calls the
loss of the shipped choice is asked (``sampled``). ``tuner`` takes calls that share a key, ``session`` all of
them, on a ``target``; of the next keys candidates are compiled meanwhile (``precompile``), and first calls are
made elsewhere (``isolation``).
"""
