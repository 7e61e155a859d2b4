"""From the arguments of a call to its result: binding, dispatch, plans and execution. No module here knows an op, a
backend or an array library by name."""
