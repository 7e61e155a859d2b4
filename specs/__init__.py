"""The ops: a module or a package each, with its gradient, found by name. Nothing is imported until an op is asked for.

What several ops share and belongs to none of them lies in modules whose names begin with an underscore.
"""
