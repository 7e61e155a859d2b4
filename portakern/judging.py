"""The judge: check an untrusted kernel against an op's spec, from outside of its process.

>>> from portakern.judging import judge
>>> judge("candidate.py", "softmax", shapes=[{"x": (64, 39321)}]).report.outcome
'wrong'
"""

from portakern.tools.judge.judgement import Judgement, judge
from portakern.tools.judge.process import ProcessLimits

__all__ = ["Judgement", "ProcessLimits", "judge"]
