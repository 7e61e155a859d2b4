"""What works on ops from outside, a folder a command: compiling for hardware that is not here (``compile``), timing
(``bench``), finding tilings (``tune``), what bounds a kernel (``profile``), judging a kernel that somebody else wrote
(``judge``). What an op needs to run, or to be checked, imports none of it, but for ``Op.lower``.
"""
