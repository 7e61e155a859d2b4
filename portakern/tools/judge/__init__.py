"""The judge of untrusted kernels.

``host``, ``adapters`` and ``sandbox`` run in the candidate's process; ``process`` and ``remote`` are the judge's side,
and ``wire`` is the protocol between them. ``mapping`` maps the op's arguments to the candidate's, ``hashing`` hashes
its files, and ``judgement`` gives the verdict. :mod:`portakern.judging` has the names for users.
"""
