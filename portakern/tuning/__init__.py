"""Finding tilings: which are legal (``space``), in which order they are tried (``search``), how good one is (``judges``,
``static``), whether it is right (``verify``), what is kept (``journal``, ``store``), and the loss of the shipped choice
(``drawn``).
"""
