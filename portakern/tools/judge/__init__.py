"""The judge: a candidate's process (``host``, ``adapters``, ``walls``) and what is said to it (``wire``), its side here
(``process``, ``remote``), how its arguments become an op's (``mapping``), whether somebody's constants are known
(``hashing``), and the verdict (``judgement``). :mod:`portakern.judging` has the names for users.
"""
