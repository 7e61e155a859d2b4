"""What every call passes through, whichever framework its arrays are of and whichever backend serves it."""
