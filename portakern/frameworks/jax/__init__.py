"""JAX: its arrays, and op calls under its transformations. Importing this imports no jax."""

from portakern.frameworks.jax.arrays import Jax

__all__ = ["FRAMEWORK"]

FRAMEWORK = Jax()
