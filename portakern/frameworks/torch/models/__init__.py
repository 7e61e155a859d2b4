"""portakern under a whole model, a module at a time: :func:`portakern.torch.apply` and what it puts there.

A module of transformers is known by what its forward does, instruction by instruction, and not by its name: each file
here names prototypes, classes of transformers whose mathematics is that of an op.
"""
