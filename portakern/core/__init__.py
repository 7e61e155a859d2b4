"""From the arguments of a call to its result: binding, routing, serving. Nothing in here knows an op, a backend or an
array library by name.
"""
