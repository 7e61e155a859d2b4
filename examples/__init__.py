"""Programs that use portakern as its users do."""
