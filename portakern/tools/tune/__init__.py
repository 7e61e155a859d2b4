"""Search for tilings. ``space``: the legal tilings; ``search``: the order of trials; ``benches`` and ``static``:
whether a tiling is right, and its score; ``journal`` and ``store``: what is kept; ``sampled``: random calls for
measuring the loss of the shipped tilings. ``tuner`` searches for the calls that share a key, ``session`` for all of
them, on a ``target``. ``precompile`` compiles candidates of the next keys meanwhile, and ``isolation`` makes first
calls in another process."""
