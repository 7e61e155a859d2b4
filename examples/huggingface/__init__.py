"""portakern inside Hugging Face transformers: through its attention interface, and under its norms."""
