"""What is judged: planted faults, cheats, right kernels of unusual kinds, and references of a public benchmark."""
