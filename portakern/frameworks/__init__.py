"""The array libraries, an adapter each: all that is particular to NumPy, to PyTorch or to JAX.

An adapter is a module or package in this folder whose ``FRAMEWORK`` is a :class:`portakern.core.framework.Framework`.
Importing it imports no library; that happens when an array of the library's is seen, or asked for. Adding a framework
adds a folder here and changes nothing else.
"""
