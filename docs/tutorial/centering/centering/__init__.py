"""An op of its own for portakern: rows about their mean."""
